"""People come in by an OpenID provider, through Streamlit's own support, before a real ``rlwatch ui``."""

import pytest
from openid_provider import OpenIdProvider, settings
from playwright.sync_api import expect
from real_dashboard import Dashboard
from test_browser_commands import choose
from waiting import patient

from rlwatch.cli import ui
from rlwatch.store.url import open_store

pytestmark = pytest.mark.browser


@pytest.fixture
def provider():
    made = OpenIdProvider(ui.free_port("127.0.0.1"))
    yield made
    made.stop()


@pytest.fixture
def dashboard(tmp_path, provider):
    """Reached as localhost, while the provider is at 127.0.0.1: two sites to a browser."""
    made = Dashboard(tmp_path)
    file, callback = tmp_path / "oidc.toml", f"http://localhost:{made.port}/oauth2callback"
    file.write_text(settings(provider, callback, operators=["Ann@example.org"], viewers=["*@example.org"]))
    made.start("--oidc", str(file))
    yield made
    made.stop()


def arrive(browser, dashboard, address, path="/"):
    """A new browser that goes to the provider and says who it is."""
    page = patient(browser).new_page()
    page.goto(f"http://localhost:{dashboard.port}{path}")
    page.get_by_role("link", name="Log in with your organisation").click()
    expect(page).to_have_title("provider")
    page.get_by_label("Address").fill(address)
    page.get_by_role("button", name="It is me").click()
    return page


def test_who_is_on_a_list_comes_in_under_their_own_name(dashboard, train, browser):
    """An operator commands, and the command is theirs; a viewer looks; after logging out the door is shut again."""
    trainer = train("live_loop.py", steps=5)
    page = arrive(browser, dashboard, "ann@example.org")
    page.get_by_role("link", name=trainer.name).click()
    expect(page.locator(".rl-who")).to_contain_text("ann@example.org · operator")
    dialog = choose(page, "Save checkpoint…")
    expect(dialog).to_contain_text("Signed in as ann@example.org (operator)")
    dialog.get_by_role("button", name="Send").click()
    expect(dialog).to_be_hidden()
    assert [c.requested_by for c in open_store(dashboard.store).commands(trainer.run_id)] == ["ann@example.org"]

    viewer = arrive(browser, dashboard, "bob@example.org")
    expect(viewer.locator(".rl-who")).to_contain_text("bob@example.org · viewer")

    page.get_by_role("link", name="log out").click()
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_label("Token")).to_be_visible()
    page.goto(f"http://localhost:{dashboard.port}/")
    expect(page.get_by_label("Token")).to_be_visible()


def test_nobody_else_comes_in(dashboard, provider, browser):
    """An address on no list, one that the provider does not vouch for, a token that somebody else signed."""
    stranger = arrive(browser, dashboard, "eve@elsewhere.org")
    expect(stranger.get_by_role("alert")).to_contain_text("eve@elsewhere.org has no access")
    expect(stranger.get_by_label("Token")).to_be_visible()

    provider.claims = {"email_verified": False}
    unproven = arrive(browser, dashboard, "ann@example.org")
    expect(unproven.get_by_role("alert")).to_contain_text("user without a verified e-mail address has no access")

    provider.claims, provider.forged = {}, True
    forged = arrive(browser, dashboard, "ann@example.org")
    expect(forged.get_by_role("link", name="Log in with your organisation")).to_be_visible()
    expect(forged.locator(".rl-who")).to_have_count(0)
