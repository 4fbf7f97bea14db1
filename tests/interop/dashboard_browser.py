"""Looks at the dashboard in a real browser: BROWSER URL FOLDER NAME, where NAME is a server name that has no route; or, with the
further argument `picture`, takes the picture of the README alone.

Every view with and without scripts, light and dark, wide and 400 px narrow; keyboard only; no request to another
place; nothing that the policy had to block; no dialog, which a script in a name would open. Screenshots go to FOLDER.
"""

import sys
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

browser_path, base, folder, unknown, *only = sys.argv[1:]
folder = Path(folder)
folder.mkdir(parents=True, exist_ok=True)


def check(what, condition, found=None):
    assert condition, f"{what}: {found}"


def open_page(browser, scheme="light", width=1280, scripts=True):
    context = browser.new_context(
        color_scheme=scheme, viewport={"width": width, "height": 900}, java_script_enabled=scripts
    )
    page = context.new_page()
    page.faults = []
    page.on("console", lambda message: page.faults.append(f"console: {message.type}: {message.text}"))
    page.on("pageerror", lambda error: page.faults.append(f"error: {error}"))
    page.on("dialog", lambda dialog: (page.faults.append(f"dialog: {dialog.message}"), dialog.dismiss()))

    def seen(request):
        if not request.url.startswith(base) and not request.url.startswith("data:"):
            page.faults.append(f"request: {request.url}")

    page.on("request", seen)
    return page


def done(page, name):
    page.screenshot(path=folder / f"{name}.png", full_page=True)
    check(f"{name}: nothing went wrong", page.faults == [], page.faults)
    page.context.close()


def colours(page):
    return page.evaluate("[getComputedStyle(document.documentElement).backgroundColor, getComputedStyle(document.body).color]")


def views(browser):
    for scheme in ("light", "dark"):
        for width in (1280, 400):
            for scripts in (True, False):
                name = f"{scheme}-{width}-{'scripts' if scripts else 'plain'}"
                page = open_page(browser, scheme, width, scripts)
                page.goto(base + "/")
                for heading in (
                    "Refused and failed", "Last failures", "Services and routes", "Networks", "Registries",
                    "xDS clients", "Certificates", "Config",
                ):
                    check(f"{name}: {heading}", page.get_by_role("heading", name=heading).is_visible())
                check(f"{name}: the state", "problem" in page.locator("#state").inner_text())
                check(f"{name}: the failure", unknown in page.locator("main").inner_text())
                one_map = [page.locator(f"svg.{form}").is_visible() for form in ("wide", "narrow")]
                check(f"{name}: one map", one_map == [width > 640, width <= 640], one_map)
                if scripts:
                    overflow = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
                    check(f"{name}: no sideways scrolling", overflow <= 0, overflow)
                done(page, name)


def colours_follow(browser):
    found = []
    for scheme in ("light", "dark"):
        page = open_page(browser, scheme)
        page.goto(base + "/")
        found.append(colours(page))
        page.context.close()
    check("dark is not light", found[0][0] != found[1][0] and found[0][1] != found[1][1], found)


def keyboard(browser):
    """Skip link, explain, search and the tables of networks, by keys alone and without scripts of ours."""
    page = open_page(browser, scripts=False)
    page.goto(base + "/")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_url(base + "/#main", timeout=10_000)
    page.goto(base + "/")
    for _ in range(2):
        page.keyboard.press("Tab")
    page.keyboard.type(unknown)
    page.keyboard.press("Enter")
    page.wait_for_selector("#answer")
    answer = page.locator("#answer").inner_text()
    check("explain answers", "refused" in answer and "sni_unknown" in answer, answer)
    near = page.locator("#answer a").first
    near.focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**explain=checkout**")
    answer = page.locator("#answer").inner_text()
    check("the near name is explained", "no_endpoints" in answer, answer)
    page.goto(base + "/")
    page.locator("input[name=q]").focus()
    page.keyboard.type("api")
    page.keyboard.press("Enter")
    page.wait_for_url("**q=api**")
    names = page.locator("section[aria-labelledby=services] td.name").all_inner_texts()
    check("search finds", names and all("api" in name for name in names), names)
    summary = page.locator("#gateways summary")
    summary.focus()
    page.keyboard.press("Enter")
    check("the tables open", page.locator("#gateways table").first.is_visible())
    done(page, "keyboard")


def refresh(browser):
    """The script puts a new state in place of the old one, without a new page, and says so when nobody answers."""
    page = open_page(browser)
    page.goto(base + "/")
    page.evaluate("window.same = true")
    before = page.locator("#top dl").inner_text()
    deadline = time.monotonic() + 20
    while page.locator("#top dl").inner_text() == before:
        check("the state changes within 20 s", time.monotonic() < deadline)
        page.wait_for_timeout(200)
    check("it is the same page", page.evaluate("window.same") is True)
    check("nothing went wrong", page.faults == [], page.faults)
    page.route("**/*", lambda route: route.abort())
    page.wait_for_selector("body.lost", timeout=20_000)
    check("it says so", "does not answer" in page.locator("#fresh").inner_text())
    page.screenshot(path=folder / "lost.png")
    page.unroute("**/*")
    page.wait_for_selector("body:not(.lost)", timeout=20_000)
    page.context.close()


def explained(browser):
    page = open_page(browser, "dark")
    page.goto(base + "/?explain=" + unknown)
    check("the answer is there", page.locator("#answer").is_visible())
    done(page, "explain")


def picture(browser):
    page = open_page(browser)
    page.goto(base + "/?explain=" + unknown)
    page.screenshot(path=folder / "picture.png")
    check("nothing went wrong", page.faults == [], page.faults)
    page.context.close()


with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
    for part in (picture,) if only else (views, colours_follow, keyboard, refresh, explained):
        part(browser)
        print(f"{part.__name__}: ok", flush=True)
    browser.close()
