"""What opens above a page, in both themes and on a phone: axe finds nothing in it, and a thumb gets a command through."""

import re

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import TimeoutError as NotInTime
from playwright.sync_api import expect
from test_browser_accessible import SIZES, opened
from test_browser_commands import choose
from test_browser_pages import write

from rlwatch.store.url import open_store

pytestmark = pytest.mark.browser

THUMB_PX = 24
"""Least height of what a thumb must hit (WCAG 2.2, target size)."""


def command(page, app, kind):
    """The dialog of a command to the live run."""
    opened(page, f"{app}/run?run=ill")
    if kind == "Reset reference…":
        page.get_by_role("button", name=kind).click()
        return page.get_by_role("dialog")
    return choose(page, kind)


def incident(page, app, act):
    """The dialog of the incident, at what is to be done about it: to begin with that somebody takes it on."""
    opened(page, f"{app}/alerts?incident=a1")
    dialog = page.get_by_role("dialog")
    if not act:
        return dialog
    dialog.get_by_role("radio", name=act).or_(dialog.get_by_role("button", name=act)).first.click()
    return dialog


def edit(page, app, _):
    """The dialog in which runs are named and tagged."""
    opened(page, f"{app}/?project=p")
    page.get_by_role("checkbox", name="Select seed3").first.check()
    page.get_by_role("button", name="Edit…").click()
    return page.get_by_role("dialog")


def popover(page, app, name):
    """What filters the list of runs, or chooses its columns."""
    opened(page, app)
    page.get_by_role("button", name=name).click()
    return page.get_by_test_id("stPopoverBody")


def remedies(page, app, _):
    """The drawer of a run with all of its folds open."""
    opened(page, f"{app}/run?run=ill")
    for fold in ("Causes and actions", "Settings", "Environment"):
        page.locator(".st-key-drawer summary", has_text=fold).click()
    return page.locator(".st-key-drawer")


def edit_several(page, app, _):
    """The dialog in which several runs get tags."""
    opened(page, f"{app}/?project=p")
    for run in ("seed3", "seed4"):
        page.get_by_role("checkbox", name=f"Select {run}").first.check()
    page.get_by_role("button", name="Edit…").click()
    return page.get_by_role("dialog")


def deleted(page, app, _):
    """What is said of a run that was deleted, beside the way back."""
    opened(page, f"{app}/?project=p")
    page.get_by_role("checkbox", name="Select seed4").first.check()
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.get_by_role("button", name="Undo")).to_be_visible()
    return page.get_by_test_id("stMain")


def rule(page, app, name):
    """The editor of rules, with one tried on the runs there are."""
    opened(page, f"{app}/rules")
    for _ in range(10):  # what is drawn anew meanwhile closes the list
        page.get_by_role("combobox", name="Rule", exact=True).click()
        try:
            page.get_by_role("option", name=name).first.click(timeout=4000)
        except NotInTime:
            continue
        break
    page.get_by_role("button", name="Test", exact=True).click()
    expect(page.get_by_text(re.compile("would have|Would have"))).to_be_visible()
    return page.get_by_test_id("stMain")


OVERLAYS = {
    "reset": (command, "Reset reference…"), "lower": (command, "Lower learning rate…"),
    "incident": (incident, ""), "snooze": (incident, "Snooze"), "silence": (incident, "Silence"),
    "note": (incident, "Note"), "edit": (edit, ""), "edit several": (edit_several, ""), "filter": (popover, "Filter"),
    "view": (popover, "View"), "drawer": (remedies, ""), "rule": (rule, "entropy"), "deleted": (deleted, ""),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_axe_finds_nothing_in_what_opens_above_a_page(shared_app, page, filled, scheme, size):
    """Dialogs of commands, incidents and edits, what hangs below buttons, an open drawer, a rule that is tried."""
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size(SIZES[size])
    found = {}
    for name, (draw, what) in OVERLAYS.items():
        overlay = draw(page, shared_app, what)
        expect(overlay).to_be_visible()
        expect(page.get_by_test_id("stApp")).to_have_attribute("data-test-script-state", "notRunning")
        overlay.evaluate("node => node.setAttribute('data-looked-at', '')")
        seen = Axe().run(page, context="[data-looked-at]").response
        assert seen["passes"], name
        for wrong in seen["violations"]:
            found[f"{name}: {wrong['help']}"] = [node["html"][:200] for node in wrong["nodes"][:3]]
    page.get_by_role("button", name="Undo").click()
    expect(page.get_by_role("button", name="Undo")).to_have_count(0)
    assert found == {}


def test_every_command_of_the_menu_can_be_pressed_on_a_low_screen(shared_app, page, shared_store):
    """There are many: the list is no longer than what lies above or below its button, and scrolls."""
    write(shared_store, "low", steps=range(1, 31))
    page.set_viewport_size({"width": 1280, "height": 720})
    opened(page, f"{shared_app}/run?run=low&live=false")
    page.get_by_role("button", name="Commands", exact=True).click()
    entries = page.get_by_role("menuitem")
    expect(entries.nth(10)).to_be_attached()
    for entry in entries.all():
        entry.click(trial=True, timeout=10_000)


def test_a_command_takes_three_taps_and_its_confirmation_on_a_phone(shared_app, joined, shared_store):
    """From the list: the run, what is asked, and send; wide enough for a thumb, and nothing beyond the screen."""
    write(shared_store, "tapped", name="pocket", steps=range(1, 31))
    phone = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True, "device_scale_factor": 1}
    page = joined(shared_app, "operator", "ann", **phone)
    page.goto(f"{shared_app}/?search=pocket")
    for step in (
        page.get_by_role("link", name="pocket"),
        page.get_by_role("button", name="Reset reference…"),
    ):
        step.tap()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label(re.compile("^Type")).press_sequentially("pocket")
    send = dialog.get_by_role("button", name="Send")
    expect(send).to_be_enabled()
    for pressed in (send, dialog.get_by_role("button", name="Cancel")):
        box = pressed.bounding_box()
        assert box["height"] >= THUMB_PX
        assert 0 <= box["x"] < box["x"] + box["width"] <= 390
    assert dialog.evaluate("node => node.scrollWidth - node.clientWidth") <= 0
    send.tap()
    expect(dialog).to_be_hidden()
    [command] = open_store(shared_store).commands("tapped")
    assert (command.kind, command.requested_by) == ("reset-reference", "ann")
