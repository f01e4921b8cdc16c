"""Licences of published weights: whether they allow commercial use, and where their texts are.

A preset's `license` is the name on the checkpoint's card, https://huggingface.co/<hub>, by that card, its publisher's
repository or a catalogue of licences; where none of them was at hand it has none. The texts decide, not these words.
"""

from __future__ import annotations

from dataclasses import dataclass

from simpletuner.models.catalog.registry import presets


@dataclass(frozen=True)
class License:
    """A licence by the name on the cards."""

    commercial_use: str
    """`yes`, `no`, or the condition, of the weights and of what is trained from them."""
    text: str
    """Address of the text."""
    is_hub_name: bool = False
    """True for a name that a card's `license` may have; of any other it is `other`, with name and link."""


HUB = "https://huggingface.co"
WITHIN_RESTRICTIONS = "yes, within its restrictions of use"
LICENSES = {
    "apache-2.0": License("yes", "https://www.apache.org/licenses/LICENSE-2.0", is_hub_name=True),
    "creativeml-openrail-m": License(
        WITHIN_RESTRICTIONS, f"{HUB}/spaces/CompVis/stable-diffusion-license", is_hub_name=True
    ),
    "mit": License("yes", "https://opensource.org/license/mit", is_hub_name=True),
    "openrail++": License(
        WITHIN_RESTRICTIONS, f"{HUB}/stabilityai/stable-diffusion-xl-base-1.0/blob/main/LICENSE.md", is_hub_name=True
    ),
    "flux-1-dev-non-commercial-license": License("no", f"{HUB}/black-forest-labs/FLUX.1-dev/blob/main/LICENSE.md"),
    "flux-non-commercial-license": License("no", f"{HUB}/black-forest-labs/FLUX.2-dev/blob/main/LICENSE.md"),
    "krea-2-community-license": License(
        "with a yearly revenue below 1,000,000 USD", f"{HUB}/krea/Krea-2-Raw/blob/main/LICENSE.pdf"
    ),
    "tencent-hunyuan-community": License(
        "outside the EU, the UK and South Korea, with up to 100 million users a month",
        f"{HUB}/tencent/HunyuanImage-2.1/blob/main/LICENSE",
    ),
    "stabilityai-ai-community": License(
        "with a yearly revenue of up to 1,000,000 USD, registered",
        f"{HUB}/stabilityai/stable-diffusion-3.5-large/blob/main/LICENSE.md",
    ),
}


def license_of(hub: str | None) -> str:
    """Return the licence of a published checkpoint by its hub id; empty where it is not known."""
    found = (each.license for preset in presets().values() for each in preset.flavours.values() if each.hub == hub)
    return next(found, "")


def describe_license(name: str) -> str:
    """Return a licence with its commercial use in words; empty for one that is not known."""
    return f"{name}; commercial use: {LICENSES[name].commercial_use}" if name else ""
