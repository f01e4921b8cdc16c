"""report.html in a real Chromium: with and without scripts, narrow and wide, light and dark."""

from __future__ import annotations

from browser import chromium
from training.test_html_report import EVIL, FACTS, write_round, write_rows

from simpletuner.report import Report
from simpletuner.training.html_report.page import HtmlReport


def test_sliders_scales_and_widths_in_a_browser(tmp_path):
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

        prompt = page.locator(".prompt").nth(1)
        assert prompt.locator(".round[data-step]:visible h4").all_inner_texts() == ["step 500"]
        assert prompt.locator("output").inner_text() == "500"
        prompt.locator("input").focus()
        page.keyboard.press("Home")
        assert prompt.locator(".round[data-step]:visible h4").all_inner_texts() == ["step 250"]
        assert page.locator(".prompt").nth(0).locator(".round[data-step]:visible").count() == 1
        page.locator("#all").focus()
        page.keyboard.press("Home")
        assert page.locator(".prompt .round[data-step]:visible h4").all_inner_texts() == ["step 250"] * 2
        images = page.locator(".image:visible img")
        assert images.count() == 2 * 3
        assert all(images.nth(number).evaluate("image => image.naturalWidth") == 160 for number in range(6))

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
        assert said == [] and [url for url in fetched if not url.startswith("data:")] == [page_file.as_uri()]

        still = browser.new_context(java_script_enabled=False).new_page()
        still.goto(page_file.as_uri())
        assert still.locator(".prompt").nth(0).locator(".round:visible").count() == 3, "all rounds, and before"
        assert still.locator(".slider:visible").count() == 0
        still.locator("label[for=log]").click()
        assert still.locator(".chart .log").first.is_visible()
