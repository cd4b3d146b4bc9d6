"""People whom an OIDC provider knows, by Streamlit's own support of it: its routes, Authlib and its signed cookie.

The gate asks here who the cookie names, and lets in whose address stands on a list. Nothing of the provider's is
believed that Streamlit has not verified: the ID token's signature, its issuer, audience and nonce.
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
"""Streamlit's, which whoever is not logged in yet may ask for, and no others."""
COOKIE = "_streamlit_user"


def login_path() -> str:
    """Path and query that send a browser to the provider; good for some minutes."""
    return f"{ROUTES[0]}?provider={encode_provider_token('default')}"


def claims_of(connection: HTTPConnection) -> Mapping[str, Any] | None:
    """The claims of the ID token that the connection's cookie keeps; None where it has none that is signed by us."""

    def single(name: str) -> bytes | None:
        value = connection.cookies.get(name)
        return None if value is None else decode_signed_value(get_cookie_secret(), name, value.encode("latin-1"))

    try:
        claims = json.loads(get_cookie_with_chunks(single, COOKIE) or b"null")
    except (ValueError, KeyError, TypeError):
        return None
    return claims if isinstance(claims, dict) and claims.get("is_logged_in") is True else None


def address_of(claims: Mapping[str, Any]) -> str:
    """The e-mail address that the provider vouches for; empty where it says that it does not."""
    email = claims.get("email")
    return email if isinstance(email, str) and claims.get("email_verified") is not False else ""


def role_of(address: str, people: Mapping[str, Sequence[str]]) -> str | None:
    """The first role on whose list the address stands; ``*`` in a list stands for anything."""
    wanted = address.lower()
    return next(
        (role for role, listed in people.items() if wanted and any(fnmatchcase(wanted, one.lower()) for one in listed)),
        None,
    )
