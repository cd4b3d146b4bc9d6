"""Users authenticated by an OIDC provider, through Streamlit's own support: its routes, Authlib and its signed cookie.

The gate reads the user from the cookie and admits the addresses on its lists. Only claims that Streamlit has verified
are used: it checks the ID token's signature, issuer, audience and nonce.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from starlette.requests import HTTPConnection
from streamlit.auth_util import encode_provider_token, get_cookie_with_chunks
from streamlit.web.server.server_util import get_cookie_secret
from streamlit.web.server.starlette.starlette_app_utils import decode_signed_value

ROUTES = ("/auth/login", "/auth/logout", "/oauth2callback")
"""Streamlit's routes for the login, the only ones open without a session."""
COOKIE = "_streamlit_user"


def login_path() -> str:
    """Return the path and query that redirect a browser to the OIDC provider; valid for some minutes."""
    return f"{ROUTES[0]}?provider={encode_provider_token('default')}"


def claims_of(connection: HTTPConnection) -> Mapping[str, Any] | None:
    """Return the claims of the ID token in the connection's cookie, or None without a valid signature."""

    def single(name: str) -> bytes | None:
        value = connection.cookies.get(name)
        return None if value is None else decode_signed_value(get_cookie_secret(), name, value.encode("latin-1"))

    try:
        claims = json.loads(get_cookie_with_chunks(single, COOKIE) or b"null")
    except (ValueError, KeyError, TypeError):
        return None
    return claims if isinstance(claims, dict) and claims.get("is_logged_in") is True else None


def address_of(claims: Mapping[str, Any]) -> str:
    """Return the verified e-mail address in the claims of an ID token; "" if the provider has not verified it."""
    email = claims.get("email")
    return email if isinstance(email, str) and claims.get("email_verified") is not False else ""


def role_of(address: str, people: Mapping[str, Sequence[str]]) -> str | None:
    """Return the first role in ``people`` whose list matches the e-mail address, or None; ``*`` in a list matches
    anything.
    """
    wanted = address.lower()
    return next(
        (role for role, listed in people.items() if wanted and any(fnmatchcase(wanted, one.lower()) for one in listed)),
        None,
    )
