"""The editor in a real Chromium: from typing to the file on disk, and the file replayed by the command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from page_server import PageServer, page_server
from playwright.sync_api import Page, expect

CONFIG = """\
# my run
model_family = "sdxl"  # the base
model_flavour = "tiny"
instance_data_dir = "pictures"
seed = 3
validation_prompt = ["a lighthouse", "a <b>boat</b>"]
"""
EVIL = "</script><img src=x onerror=alert(1)>{{ 7 * 7 }}"


@pytest.fixture
def config(folder: Path) -> Path:
    (folder / "pictures").mkdir(exist_ok=True)
    (folder / "pictures" / "a.png").touch()
    (folder / "config").mkdir(exist_ok=True)
    path = folder / "config" / "run.toml"
    path.write_text(CONFIG)
    return path


def open_editor(page: Page, server: PageServer, view: str = "all") -> None:
    page.goto(f"{server.origin}/configurations/edit?file=config/run.toml&view={view}")


def replayed(folder: Path, path: Path) -> dict[str, Any]:
    """What the command line makes of a file."""
    command = [sys.executable, "-m", "simpletuner", "config", "show", "--all", "--json", f"--config={path}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return {name: row["value"] for name, row in json.loads(done.stdout).items()}


def test_listing_creating_and_copying(page: Page, server: PageServer, folder: Path, config: Path):
    (folder / "package.json").write_text('{"name": "x", "version": "1", "seed": 1}')
    (folder / "broken.toml").write_text("a = ")
    page.goto(server.origin)
    page.wait_for_url("**/configurations*")
    assert page.locator("tbody th").all_inner_texts() == ["config/run.toml"]
    page.get_by_label("GPUs").fill("2")
    page.get_by_label("Recipe").select_option("wan-video")
    expect(page.locator("#new-purpose")).to_contain_text("by LoRA on clips")
    expect(page.get_by_label("Model family")).to_have_value("wan")
    expect(page.get_by_label("Model flavour")).to_have_value("t2v-480p-1.3b-2.1")
    page.get_by_role("textbox", name="File").fill("config/clips.toml")
    page.get_by_role("button", name="Create").click()
    page.wait_for_url("**/configurations/edit?file=*clips.toml")
    made = replayed(folder, Path("config/clips.toml"))
    assert (made["lora_rank"], made["num_processes"], made["learning_rate"]) == (32, 2, 5e-5)
    assert made["data_backend_config"] == "config/clips.datasets.json"
    assert "finetrainers_wan: --rank 32" in (folder / "config" / "clips.toml").read_text()
    assert json.loads((folder / "config" / "clips.datasets.json").read_text())[0]["video"] == {"num_frames": 49}
    refused = server.post("/configurations/new", {"recipe": "/etc/passwd.toml", "target": "config/no.toml"})
    assert refused.code == 400 and "there is no recipe" in refused.text
    page.goto(server.origin + "/configurations")
    page.get_by_label("Recipe").select_option("sdxl-full")
    expect(page.locator("#new-purpose")).to_contain_text("All weights of SDXL")
    page.get_by_label("Recipe").select_option("")
    expect(page.locator("#new-purpose")).to_contain_text("for one purpose")
    page.get_by_label("Model family").select_option("flux")
    expect(page.get_by_label("Model flavour").locator("option").first).to_have_text("krea")
    page.get_by_label("Model flavour").select_option("tiny")
    page.get_by_label("GPUs").fill("4")
    page.get_by_role("textbox", name="File").fill("config/new.toml")
    page.get_by_role("button", name="Create").click()
    page.wait_for_url("**/configurations/edit?file=*new.toml")
    new = (folder / "config" / "new.toml").read_text()
    assert 'model_family = "flux"' in new and "num_processes = 4" in new and "fsdp_enable = true" in new
    page.goto(server.origin + "/configurations")
    page.get_by_label("Copy config/run.toml").click()
    page.get_by_label("Name of the copy").nth(2).fill("../outside.toml")
    page.get_by_role("button", name="Copy", exact=True).click()
    expect(page.locator("#toasts .error")).to_contain_text("is not in")
    page.get_by_label("Name of the copy").nth(2).fill("config/copy.toml")
    page.get_by_role("button", name="Copy", exact=True).click()
    page.wait_for_url("**/configurations/edit?file=*copy.toml")
    copied = (folder / "config" / "copy.toml").read_text().splitlines()
    assert 'output_dir = "output/copy"' in copied, "a run's folder is one project's"
    assert [line for line in copied if not line.startswith("output_dir")] == CONFIG.splitlines()
    assert server.post("/configurations/copy", {"file": "config/run.toml", "target": "config/copy.toml"}).code == 400


def test_typing_is_checked_and_saved_in_place(page: Page, server: PageServer, folder: Path, config: Path):
    open_editor(page, server)
    assert "All settings are valid" in page.locator("#summary").inner_text()
    assert "from config/run.toml:5" in page.locator("#note-seed").inner_text()
    before = page.locator("#f-model_flavour").bounding_box()
    page.get_by_label("learning_rate").fill("fast")
    expect(page.locator("#note-learning_rate .mistake")).to_contain_text("use a number above 0")
    # Why it is grey is a sentence beside it: a phone shows no tooltip.
    expect(page.get_by_role("button", name="Start")).to_be_disabled()
    expect(page.get_by_text("save to start")).to_be_visible()
    page.evaluate("scrollTo(0, 0)")
    assert page.locator("#f-model_flavour").bounding_box() == before, "nothing above the mistake has moved"
    expect(page.get_by_label("learning_rate")).to_have_attribute("aria-invalid", "true")
    assert page.evaluate("document.activeElement.name") == "learning_rate", "typing goes on"
    page.get_by_label("learning_rate").scroll_into_view_if_needed()
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#toasts .error")).to_contain_text("nothing is saved: correct learning_rate first")
    assert config.read_text() == CONFIG
    page.get_by_label("learning_rate").fill("2e-5")
    expect(page.locator("#note-learning_rate .mistake")).to_have_count(0)
    # A contradiction stands at each setting that it names.
    page.locator("#f-fsdp_enable").select_option("true")
    page.locator("#f-zero_stage").select_option("2")
    for name in ("fsdp_enable", "zero_stage"):
        expect(page.locator(f"#note-{name} .mistake")).to_contain_text("cannot be enabled simultaneously")
    page.locator("#f-zero_stage").select_option("")
    expect(page.locator("#note-fsdp_enable .mistake")).to_have_count(0)
    page.locator("#f-seed").fill("")
    page.get_by_label("prompt 2", exact=True).fill(EVIL)
    page.locator("#f-instance_data_dir").fill("no/such")
    expect(page.locator("#note-instance_data_dir .mistake")).to_contain_text("there is no folder")
    page.locator("#f-instance_data_dir").fill("pictures")
    expect(page.locator("#changed")).to_have_text("4")
    # As after a text field was made larger with the mouse; copied to what is swapped in, it would be refused by CSP.
    page.evaluate("document.querySelectorAll('#editor [id]').forEach(each => { each.style.height = '50px' })")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#toasts .done")).to_contain_text("4 settings changed")
    expect(page.locator("#changed")).to_be_hidden()
    lines = config.read_text().splitlines()
    assert lines[:4] == CONFIG.splitlines()[:4], "comments and order stay"
    assert "seed" not in "".join(lines) and "learning_rate = 2e-05" in lines
    values = replayed(folder, config)
    assert values["validation_prompt"] == ["a lighthouse", EVIL] and values["fsdp_enable"] is True
    assert values["learning_rate"] == 2e-5 and values["seed"] == 42
    assert page.locator("#f-validation_prompt").input_value() == f"a lighthouse\n{EVIL}", "shown as text"


def test_families_and_their_flavours_are_chosen(page: Page, server: PageServer, folder: Path, config: Path):
    config.write_text(CONFIG + 'model_families = {mine = "package.module:Mine"}\n')
    open_editor(page, server)
    family, flavour = page.locator("#f-model_family"), page.locator("#f-model_flavour")
    assert {"", "sdxl", "flux", "mine"} <= {
        *family.locator("option").evaluate_all("each => each.map(one => one.value)")
    }
    family.select_option("flux")
    expect(flavour.locator("option[value=schnell]")).to_have_count(1)
    assert flavour.input_value() == "tiny", "what the file says"
    flavour.select_option("schnell")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#toasts .done")).to_contain_text("2 settings changed")
    values = replayed(folder, config)
    assert (values["model_family"], values["model_flavour"]) == ("flux", "schnell")
    page.set_viewport_size({"width": 320, "height": 700})
    lines = page.get_by_role("heading", level=1).evaluate(
        """heading => {
          const range = document.createRange();
          range.selectNodeContents(heading.lastChild);
          return range.getClientRects().length;
        }"""
    )
    assert lines == 1, "a narrow screen breaks a path after a slash, not within a name"


def test_the_short_form_is_first_and_what_is_typed_goes_along(
    page: Page, server: PageServer, folder: Path, config: Path
):
    command = [sys.executable, "-m", "simpletuner", "config", "init", "--model_family=sdxl", "--output=new.toml"]
    subprocess.run(command, cwd=folder, capture_output=True, check=True)
    page.goto(f"{server.origin}/configurations/edit?file=new.toml")
    expect(page.get_by_role("link", name="Essentials")).to_have_attribute("aria-current", "page")
    assert page.locator(".fields").bounding_box()["height"] < 2.2 * 800
    address = f"{server.origin}/configurations/edit?file=config/run.toml"
    page.goto(f"{address}#setting-max_grad_norm")  # a link that names no view, to a setting outside the short form
    page.wait_for_url("**view=all#setting-max_grad_norm")
    expect(page.locator("#f-max_grad_norm")).to_be_focused()

    page.goto(address)
    page.locator("#f-max_train_steps").fill("9")
    page.get_by_label("Search settings").fill("max_grad_norm")
    page.get_by_role("link", name="Search all settings").click()
    page.wait_for_url("**view=all*")
    expect(page.get_by_label("Search settings")).to_have_value("max_grad_norm")
    page.locator("#f-max_grad_norm").fill("0.5")
    expect(page.locator("#changed")).to_have_text("2")
    page.get_by_label("Search settings").fill("")
    assert page.locator("#f-max_train_steps").input_value() == "9"
    page.get_by_role("link", name="Only what is set").click()
    page.wait_for_url("**view=set")
    shown = {"model_family", "model_flavour", "instance_data_dir", "seed", "validation_prompt"}
    expect(page.locator("#carried")).to_be_visible()
    names = page.locator(".fields [name]").evaluate_all("each => each.map(one => one.name)")
    assert {*names} == shown | {"max_train_steps", "max_grad_norm"}
    page.get_by_label("Undo the change of max_grad_norm").click()
    expect(page.locator("#changed")).to_have_text("1")
    page.get_by_label("Undo the change of max_train_steps").click()
    expect(page.locator("#carried")).to_be_hidden()
    page.get_by_role("link", name="Essentials").click()
    page.wait_for_url("**view=essential")
    page.locator("#f-max_train_steps").fill("8")
    page.get_by_role("link", name="Hardware → Accelerate").click()
    page.wait_for_url("**view=accelerate")

    # A select for known values, and any other one by its last choice.
    policy = page.get_by_role("combobox", name=re.compile("^Auto Wrap Policy"))
    policy.select_option("NO_WRAP")
    expect(page.locator("#f-fsdp_auto_wrap_policy")).to_be_hidden()
    expect(page.locator("#changed")).to_have_text("2")
    policy.select_option("another value")
    page.locator("#f-fsdp_auto_wrap_policy").fill("my.package.policy")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#toasts .done")).to_contain_text("2 settings changed")
    new = config.read_text().removeprefix(CONFIG).splitlines()
    assert sorted(new) == ['fsdp_auto_wrap_policy = "my.package.policy"', "max_train_steps = 8"]
    expect(policy).to_have_value("other")
    assert page.evaluate("sessionStorage.getItem('simpletuner-changes')") is None


def test_prompts_are_rows(page: Page, server: PageServer, config: Path):
    page.goto(f"{server.origin}/configurations/edit?file=config/run.toml")
    first, second = (page.get_by_label(f"prompt {number}", exact=True) for number in (1, 2))
    assert (first.input_value(), second.input_value()) == ("a lighthouse", "a <b>boat</b>")
    first.press("Enter")
    page.keyboard.type("[red], a fox")
    assert second.input_value() == "[red], a fox"
    page.get_by_label("Remove prompt 1", exact=True).click()
    expect(first).to_be_focused()
    page.get_by_role("button", name="Add a prompt").click()
    page.keyboard.insert_text("one\n\ntwo")  # as if pasted
    expect(page.get_by_label("prompt 4", exact=True)).to_have_value("two")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#toasts .done")).to_contain_text("1 setting changed")
    written = 'validation_prompt = ["[red], a fox", "a <b>boat</b>", "one", "two"]'
    assert config.read_text() == CONFIG.replace(CONFIG.splitlines()[-1], written)
    expect(page.get_by_label("prompt 4", exact=True)).to_have_value("two")


def test_a_first_run_is_set_up_and_started_from_the_editor(page: Page, server: PageServer, folder: Path, config: Path):
    config.write_text(CONFIG + 'output_dir = "out"\n')
    open_editor(page, server, "essential")
    assert 15 < page.locator(".field").count() < 30 and page.locator("#f-instance_data_dir").is_visible()
    page.locator("#f-max_train_steps").fill("9")
    page.locator("#f-resolution").fill("64")
    expect(page.locator("#start")).to_be_disabled()
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#toasts .done")).to_contain_text("2 settings changed")
    lines = config.read_text().splitlines()
    assert "max_train_steps = 9" in lines and "resolution = 64" in lines, "whole numbers are written as such"
    page.get_by_role("button", name="Start").click()  # `pictures` is empty, so the run fails at once and in words
    page.wait_for_url("**/runs/watch?run=out")
    expect(page.locator("#live-status")).to_contain_text("no usable image in")


def test_a_file_that_changes_meanwhile(page: Page, server: PageServer, config: Path):
    open_editor(page, server)
    page.locator("#f-seed").fill("7")
    config.write_text(CONFIG.replace("seed = 3", "seed = 5\nmax_train_steps = 9"))
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#conflict")).to_contain_text("has changed on disk")
    assert page.locator("#conflict tbody tr").inner_text().split() == ["seed", "5", "7"]
    assert "seed = 5" in page.locator("#conflict pre").nth(0).inner_text()
    assert "seed = 7" in page.locator("#conflict pre").nth(1).inner_text()
    assert "seed = 5" in config.read_text(), "nothing is lost"
    page.get_by_role("button", name="Save mine on top").click()
    expect(page.locator("#toasts .done")).to_be_visible()
    assert "seed = 7\nmax_train_steps = 9" in config.read_text()
    expect(page.locator("#conflict")).to_be_empty()
    # The other choice: what is on disk stays.
    page.locator("#f-seed").fill("8")
    config.write_text(CONFIG)
    expect(page.locator("#conflict")).to_be_empty()
    page.locator("#f-lr_end").fill("1e-6")
    expect(page.locator("#conflict")).to_contain_text("has changed on disk")
    page.get_by_role("link", name="Load the file as it is on disk").click()
    expect(page.locator("#f-seed")).to_have_value("3")
    assert config.read_text() == CONFIG


def test_searching_and_links_survive_reload_and_back(page: Page, server: PageServer, config: Path):
    open_editor(page, server)
    page.keyboard.press("/")
    page.keyboard.type("warm-up")
    expect(page.locator(".field:visible")).to_have_count(2)
    page.reload()
    expect(page.get_by_label("Search settings")).to_have_value("warm-up")
    expect(page.locator(".field:visible")).to_have_count(2)
    page.get_by_label("Search settings").fill("zzz")
    expect(page.locator("#nothing-found")).to_be_visible()
    expect(page.locator("section.card:visible")).to_have_count(0)
    page.goto(page.url + "#setting-max_grad_norm")
    page.reload()
    assert page.evaluate("document.activeElement.name") == "max_grad_norm"
    assert page.locator("#setting-max_grad_norm").bounding_box()["y"] > 60, "not below the sticky head"
    page.get_by_role("link", name="Hardware → Accelerate").click()
    page.wait_for_url("**view=accelerate")
    page.go_back()
    expect(page.locator("#setting-seed")).to_be_visible()


def test_leaving_with_changes_asks(page: Page, server: PageServer, config: Path):
    open_editor(page, server)
    page.locator("#f-seed").fill("8")
    asked: list[str] = []
    page.on("dialog", lambda dialog: (asked.append(dialog.type), dialog.dismiss()))
    with page.expect_event("dialog"):
        page.get_by_role("link", name="Preferences").click()
    assert asked == ["beforeunload"] and page.locator("#f-seed").input_value() == "8"
    page.locator("#f-seed").fill("3")


def test_hardware_labels_and_what_cannot_be_had(page: Page, server: PageServer, folder: Path, config: Path):
    open_editor(page, server, "accelerate")
    for label in (
        *("Enable FSDP v2", "FSDP Version", "Reshard After Forward", "Checkpoint Format", "CPU RAM Efficient Loading"),
        *("Auto Wrap Policy", "Transformer Classes to Wrap", "Context Parallel Size", "Context Parallel Rotation"),
        *("Hybrid Sharding", "Processes", "Machines", "Backend", "DeepSpeed Config (JSON)"),
    ):
        assert page.get_by_label(label, exact=False).first.is_visible(), label
    # SDXL's U-Net cannot be split over tokens.
    assert page.get_by_label("Context Parallel Size").is_disabled()
    assert "sdxl cannot be split" in page.locator("#about-context_parallel_size").inner_text()
    assert page.get_by_label("Enable FSDP v2").is_enabled()
    page.get_by_label("Enable FSDP v2").select_option("true")
    page.get_by_label("Checkpoint Format").select_option(label="Full")
    page.get_by_role("textbox", name="Processes").fill("2")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#toasts .done")).to_contain_text("3 settings changed")
    values = replayed(folder, config)
    assert (values["fsdp_enable"], values["fsdp_state_dict_type"], values["num_processes"]) == (
        True,
        "FULL_STATE_DICT",
        2,
    )
    config.write_text(CONFIG + 'model_type = "lora"\nlearning_rate = "fast"\n')
    open_editor(page, server, "accelerate")
    page.locator("#summary").get_by_role("link", name="learning_rate").click()
    expect(page.get_by_label("learning_rate")).to_be_focused()
    page.go_back()
    expect(page.get_by_label("Enable FSDP v2")).to_be_enabled()
    expect(page.get_by_label("ZeRO Stage")).to_be_disabled()
    assert "model_type=lora cannot run with DeepSpeed" in page.locator("#about-zero_stage").inner_text()


def test_what_files_and_sources_say_is_shown(page: Page, server: PageServer, folder: Path, config: Path):
    config.write_text(CONFIG + f"sede = 1\n'{EVIL}' = 1\nlora_rank = 8\nhub_model_id = 'a/b/c'\n")
    open_editor(page, server)
    summary = page.locator("#summary").inner_text()
    assert "sede (config/run.toml:7): unknown setting; did you mean seed?" in summary
    assert EVIL in summary and "hub_model_id" in summary
    config.write_text(f"{CONFIG}lora_rank = 8\n")
    page.reload()
    page.locator("#summary details summary").click()
    assert "lora_rank = 8 has no effect" in page.locator("#summary details").inner_text()
    assert page.evaluate("document.images.length") == 1, "our icon, and nothing that a file brings"


def test_files_outside_are_not_read_by_way_of_settings(server: PageServer, folder: Path, config: Path):
    secret = folder.parent / "secret.json"
    secret.write_text('{"zero_optimization": {"stage": 2}, "hidden": 1}')
    page = server.get("/configurations/edit", file="config/run.toml").text
    checksum = page.partition('id="checksum" value="')[2].partition('"')[0]
    for name in ("deepspeed_config", "data_backend_config", "validation_prompt_file", "model_families"):
        fields = {"file": "config/run.toml", "checksum": checksum, name: str(secret)}
        checked = server.post("/configurations/check", fields).text
        assert "is not in" in checked and "hidden" not in checked, name
        assert "nothing is saved" in server.post("/configurations/save", fields).text
    assert config.read_text() == CONFIG
    for line in (f'deepspeed_config = "{secret}"', f'accelerate_config = "{secret}"'):
        config.write_text(f"{CONFIG}{line}\n")
        refused = server.get("/configurations/edit", file="config/run.toml")
        assert refused.code == 400 and "is not in" in refused.text and "hidden" not in refused.text


def test_a_config_file_elsewhere_opens_first_and_its_folder_alone_is_open(page: Page, folder: Path):
    """The current folder is not one of the page's when --folder names others."""
    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "run.json").write_text('{"model_family": "sdxl", "validation_prompt": []}')
    (folder / "run.json").write_text('{"model_family": "flux"}')
    with page_server(folder, f"--config={elsewhere / 'run.json'}", f"--folder={elsewhere}") as other:
        page.goto(other.address)
        other.address = other.next_address()
        page.wait_for_url("**/configurations/edit?file=*run.json")
        page.get_by_role("link", name="All settings").click()
        assert page.locator("#f-model_family").input_value() == "sdxl"
        assert page.locator("#f-validation_prompt").input_value() == "[]"
        page.get_by_role("button", name="Add a prompt").click()
        page.keyboard.insert_text("a\n\nb\n")
        page.locator("#f-notify_url").fill("https://example.org/secret")
        page.get_by_role("button", name="Save").click()
        expect(page.locator("#toasts .toast")).to_contain_text("is saved: 2 settings changed")
        saved = json.loads((elsewhere / "run.json").read_text())
        assert saved["validation_prompt"] == ["a", "b"] and saved["notify_url"] == "https://example.org/secret"
        # A secret is not shown again, and a blank takes it out.
        assert "example.org" not in page.content()
        page.locator("#f-notify_url").fill(" ")
        page.get_by_role("button", name="Save").click()
        expect(page.locator("#toasts .toast").nth(1)).to_contain_text("is saved: 1 setting changed")
        assert "notify_url" not in json.loads((elsewhere / "run.json").read_text())
        assert other.get("/configurations/edit", file="run.json").code == 400
        listed = other.get("/configurations").text
        assert str(elsewhere / "run.json") in listed and f'value="{elsewhere / "config.toml"}"' in listed
    page.goto("about:blank")


def test_two_tabs_do_no_harm(page: Page, server: PageServer, config: Path):
    open_editor(page, server)
    other = page.context.new_page()
    open_editor(other, server)
    page.locator("#f-seed").fill("7")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#toasts .done")).to_be_visible()
    other.locator("#f-lr_end").fill("1e-6")
    expect(other.locator("#conflict")).to_contain_text("has changed on disk")
    other.get_by_role("button", name="Save mine on top").click()
    expect(other.locator("#toasts .done")).to_be_visible()
    assert "seed = 7" in config.read_text() and "lr_end = 1e-06" in config.read_text()


def test_weaker_and_stronger_sources_are_named(folder: Path, config: Path):
    """accelerate's file gives what the config file does not say; a variable of the environment outranks both."""
    (folder / "accelerate.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: 'no'\n")
    config.write_text(CONFIG + 'mixed_precision = "bf16"\n')
    variables = {"SIMPLETUNER_SEED": "9", "SIMPLETUNER_ACCELERATE_CONFIG": "accelerate.yaml"}
    with page_server(folder, environment=variables) as other:
        text = " ".join(other.get("/configurations/edit", file="config/run.toml", view="set").text.split())
    assert "from environment SIMPLETUNER_SEED; outranks config/run.toml:5 (= 3)" in text
    assert "from accelerate.yaml:2" in text, "of num_processes"
    assert "from config/run.toml:7; outranks accelerate.yaml:3 (= no)" in text
    assert "not set (no)" in text, "what counts if the field is emptied"
