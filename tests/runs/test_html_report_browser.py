"""report.html in a real Chromium: with and without scripts, narrow and wide, light and dark."""

from __future__ import annotations

from browser import chromium
from runs.test_html_report import EVIL, FACTS, write_round, write_rows

from simpletuner.report import Report
from simpletuner.runs.report import HtmlReport


def test_images_scales_and_widths_in_a_browser(tmp_path):
    write_rows(tmp_path, 500)
    for step in (0, 250, 500):
        write_round(tmp_path, step, [EVIL, "a lighthouse"], 160)
    page_file = tmp_path / "report.html"
    HtmlReport(tmp_path, FACTS, 500, Report()).finish(f"failed: {EVIL}")
    with chromium() as browser:
        said: list[str] = []
        fetched: list[str] = []
        page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: said.append(dialog.message))
        page.on("request", lambda request: fetched.append(request.url))
        page.goto(page_file.as_uri())
        assert page.title().startswith("run </script>")

        rows = page.locator(".grid tbody th h3").all_inner_texts()
        assert rows == ["before", "step 250", "step 500"]
        heads = page.locator(".grid thead th h3")
        assert heads.all_inner_texts() == [EVIL, "a lighthouse"]
        images = page.locator(".grid .image img")
        assert images.count() == 2 * (1 + 2 * 2)
        assert all(images.nth(number).evaluate("image => image.naturalWidth") == 160 for number in range(10))
        page.locator(".grid").evaluate("grid => grid.scrollTop = 200")
        assert heads.nth(1).is_visible(), "prompts stay above their images"

        viewer, caption = page.locator("#viewer"), page.locator("#viewer .caption")
        page.locator(".grid td a").nth(1).click()
        assert viewer.is_visible() and caption.inner_text() == "a lighthouse · before · base"
        for key, said_then in [
            ("ArrowDown", "a lighthouse · step 250 · trained"),
            ("ArrowRight", "a lighthouse · step 250 · ema"),
            ("ArrowDown", "a lighthouse · step 500 · ema"),
            ("ArrowDown", "a lighthouse · step 500 · ema"),
            ("ArrowLeft", "a lighthouse · step 500 · trained"),
            ("ArrowLeft", f"{EVIL} · step 500 · ema"),
        ]:
            page.keyboard.press(key)
            assert caption.inner_text() == said_then
        assert viewer.locator("img").bounding_box()["width"] > 384  # pyright: ignore[reportOptionalSubscript]
        assert (
            viewer.get_by_role("link").get_attribute("href") == f"{tmp_path.as_uri()}/validation/step-000500/ema-00.png"
        )
        page.keyboard.press("Escape")
        assert not viewer.is_visible()

        wipe = page.locator("#wipe")
        assert wipe.locator("option").all_inner_texts() == [EVIL, "a lighthouse"]
        slider, before = wipe.locator("input"), wipe.locator(".before")
        slider.focus()
        page.keyboard.press("End")
        assert before.evaluate("image => getComputedStyle(image).clipPath") == "inset(0px 0% 0px 0px)"
        assert before.get_attribute("src") == images.nth(0).get_attribute("src")
        page.locator("#wipe select").select_option(index=1)
        assert before.get_attribute("src") == images.nth(1).get_attribute("src")

        loss = page.locator(".chart").first
        assert loss.locator(".linear").is_visible() and not loss.locator(".log").is_visible()
        page.get_by_label("logarithmic").check()
        assert loss.locator(".log").is_visible() and not loss.locator(".linear").is_visible()
        loss.locator(".area").hover()
        assert loss.locator("output").inner_text().startswith("step 2")
        light = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.emulate_media(color_scheme="dark")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
        page.set_viewport_size({"width": 390, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, "nothing is cut off on a phone"
        cut = "part => part.scrollWidth > part.clientWidth"
        assert not any(part.evaluate(cut) for part in page.locator(".wide").all()), "all columns are seen there"
        assert said == [] and [url for url in fetched if not url.startswith("data:")] == [page_file.as_uri()]

        still = browser.new_context(java_script_enabled=False).new_page()
        still.goto(page_file.as_uri())
        assert still.locator(".grid .image img:visible").count() == 2 * (1 + 2 * 2)
        assert not still.locator("#wipe").is_visible() and not still.locator("#viewer").is_visible()
        still.locator("label[for=log]").click()
        assert still.locator(".chart .log").first.is_visible()
