"""Prices of GPU hours: the cost of a run at one, and at each offer of the user's table. No torch."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from simpletuner.errors import SettingsError, without_errno
from simpletuner.parallel.devices import Device, device_by_name
from simpletuner.status_line import format_seconds
from simpletuner.system.files.cache_files import user_home
from simpletuner.system.files.regular_files import read_file

PRICES = "prices.toml"
EXAMPLE = '[[offer]] with name = "a cloud", gpu = "H100" and price = 2.5, per GPU hour'
MOST = 1e6
"""The highest price of a GPU hour that is believed, in any currency."""


class Offer(BaseModel):
    """An offer of a GPU, with its price per hour in the user's currency."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: Annotated[str, Field(min_length=1, max_length=80)]
    gpu: str
    price: Annotated[float, Field(ge=0, le=MOST, allow_inf_nan=False)]

    @property
    def device(self) -> Device:
        """Raises SettingsError for a GPU that is in no table."""
        return device_by_name(self.gpu, f"{self.name} cannot be compared")


class Offers(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    offer: Annotated[list[Offer], Field(min_length=1, max_length=100)]


def prices_file() -> Path:
    return user_home() / PRICES


def read_offers(path: Path) -> list[Offer]:
    """Read the user's table. Raises SettingsError that names the wrong entry or the missing table."""
    try:
        offers = Offers.model_validate(tomllib.loads(read_file(path).decode())).offer
    except FileNotFoundError:
        raise SettingsError(f"there is no table of prices at {path}", f"write one: {EXAMPLE}") from None
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {without_errno(error, path)}", f"it has {EXAMPLE}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise SettingsError(f"{path}: {where}: {first['msg'].lower()}", f"it has {EXAMPLE}") from None
    except (ValueError, RecursionError) as error:  # also bytes that are no UTF-8
        raise SettingsError(f"{path} is not TOML: {error}", f"it has {EXAMPLE}") from None
    for offer in offers:
        _ = offer.device
    return offers


@dataclass(frozen=True)
class Cost:
    """The cost of a run at an offer; None for what is unknown, such as the steps without images."""

    offer: Offer
    fits: bool
    step_seconds: float | None
    steps: int | None
    gpus: int

    @property
    def hours(self) -> float | None:
        return None if self.step_seconds is None or self.steps is None else self.step_seconds * self.steps / 3600

    @property
    def price(self) -> float | None:
        return price_of(self.steps, self.step_seconds, self.gpus, self.offer.price)

    @property
    def per_thousand(self) -> float | None:
        return price_of(1000, self.step_seconds, self.gpus, self.offer.price)


def price_of(steps: int | None, step_seconds: float | None, gpus: int, price: float) -> float | None:
    """Return the price of some steps on `gpus` at `price` per GPU hour; None where a number is not known."""
    return None if steps is None or step_seconds is None else steps * step_seconds / 3600 * gpus * price


Planned = tuple[bool, float | None, int | None, int]
"""Of a GPU: whether the run fits, seconds of a step, steps of the run, number of GPUs."""


def compare_offers(offers: Sequence[Offer], plan: Callable[[Device], Planned]) -> list[Cost]:
    """Return the costs at each offer, those that fit first, cheapest first; equal GPUs are planned once."""
    planned = {offer.gpu: plan(offer.device) for offer in {each.gpu: each for each in offers}.values()}
    costs = [Cost(offer, *planned[offer.gpu]) for offer in offers]
    return sorted(costs, key=lambda each: (not each.fits, each.per_thousand is None, each.per_thousand or 0.0))


def row_of(cost: Cost) -> tuple[str, ...]:
    """Return name, GPU, seconds of a step, time, and prices of a run and of 1,000 steps, of one row."""
    seconds = "" if cost.step_seconds is None else f"{cost.step_seconds:.3g} s"
    time = "" if cost.hours is None else format_seconds(cost.hours * 3600)
    return (
        cost.offer.name,
        cost.offer.gpu,
        f"{cost.offer.price:g}",
        "yes" if cost.fits else "no",
        seconds,
        time,
        as_price(cost.price),
        as_price(cost.per_thousand),
    )


COLUMNS = ("offer", "GPU", "per GPU hour", "fits", "step", "time", "price", "per 1,000 steps")


def as_price(price: float | None) -> str:
    return "" if price is None else f"{price:,.2f}"
