"""A small OpenID provider of the tests' own: signed ID tokens, a page that asks who one is, no passwords."""

import json
import secrets
import threading
import time
from contextlib import suppress
from urllib.parse import urlencode

import uvicorn
from joserfc import jwt
from joserfc.jwk import RSAKey
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse
from starlette.routing import Route

CLIENT, SECRET = "rlwatch-of-the-tests", "the client's secret, of the tests"


class OpenIdProvider:
    """Served by a thread on 127.0.0.1; ``claims`` are added to those of every token."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.claims: dict[str, object] = {"email_verified": True}
        self._key = RSAKey.generate_key(2048, {"kid": "one", "use": "sig", "alg": "RS256"})
        self._foreign = RSAKey.generate_key(2048, {"kid": "one", "use": "sig", "alg": "RS256"})
        self.forged = False
        self._asked: dict[str, dict[str, str]] = {}
        routes = [
            Route("/.well-known/openid-configuration", self._metadata),
            Route("/authorize", self._authorize),
            Route("/chosen", self._chosen),
            Route("/token", self._token, methods=["POST"]),
            Route("/keys", self._keys),
            Route("/out", self._out),
        ]
        config = uvicorn.Config(Starlette(routes=routes), port=port, log_level="error", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(30)

    def _metadata(self, _request: Request) -> JSONResponse:
        places = {"authorization": "authorize", "token": "token", "end_session": "out"}
        return JSONResponse(
            {
                "issuer": self.url,
                **{f"{name}_endpoint": f"{self.url}/{path}" for name, path in places.items()},
                "jwks_uri": f"{self.url}/keys",
                "id_token_signing_alg_values_supported": ["RS256"],
            }
        )

    def _keys(self, _request: Request) -> JSONResponse:
        return JSONResponse({"keys": [self._key.as_dict(private=False)]})

    def _authorize(self, request: Request) -> HTMLResponse:
        asked = dict(request.query_params)
        assert asked["client_id"] == CLIENT
        ticket = secrets.token_hex(8)
        self._asked[ticket] = asked
        return HTMLResponse(
            f'<title>provider</title><form action="/chosen"><input type="hidden" name="ticket" value="{ticket}">'
            '<label>Address<input name="email"></label><button>It is me</button></form>'
        )

    def _chosen(self, request: Request) -> RedirectResponse:
        asked = self._asked[request.query_params["ticket"]]
        asked["email"] = request.query_params["email"]
        back = urlencode({"code": request.query_params["ticket"], "state": asked["state"]})
        return RedirectResponse(f"{asked['redirect_uri']}?{back}")

    async def _token(self, request: Request) -> JSONResponse:
        form = dict(await request.form())
        asked, now = self._asked.pop(form["code"]), int(time.time())
        said = {"iss": self.url, "aud": CLIENT, "sub": asked["email"], "iat": now, "exp": now + 300}
        claims = {**said, "nonce": asked["nonce"], "email": asked["email"], **self.claims}
        key = self._foreign if self.forged else self._key
        token = jwt.encode({"alg": "RS256", "kid": "one"}, claims, key)
        return JSONResponse({"access_token": "opaque", "token_type": "Bearer", "id_token": token, "expires_in": 300})

    def _out(self, request: Request) -> RedirectResponse:
        with suppress(KeyError):
            return RedirectResponse(request.query_params["post_logout_redirect_uri"])
        return HTMLResponse("out")


def settings(provider: OpenIdProvider, callback: str, **people: list[str]) -> str:
    """The file of ``rlwatch ui --oidc``."""
    auth = {
        "redirect_uri": callback,
        "cookie_secret": "a secret of the tests that nobody guesses",
        "client_id": CLIENT,
        "client_secret": SECRET,
        "server_metadata_url": f"{provider.url}/.well-known/openid-configuration",
    }
    lines = [f"{name} = {json.dumps(value)}" for name, value in auth.items()]
    lists = [f"{name} = {json.dumps(value)}" for name, value in people.items()]
    return "\n".join(["[auth]", *lines, "", "[rlwatch]", *lists, ""])
