"""A small provider of OpenID Connect on loopback: everybody who comes is logged in at once."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, unquote_plus, urlencode, urlsplit

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa

CLIENT = "orbitmq console"
SECRET = "s3cret: of the client"  # noqa: S105


def new_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


@dataclass
class OidcProvider:
    """The provider, and what it says."""

    #: Claims of the next ID tokens; None leaves a usual one out.
    claims: dict[str, Any] = field(default_factory=dict)
    #: What its discovery document says otherwise.
    about: dict[str, Any] = field(default_factory=dict)
    #: What it sends browsers back with instead of a code.
    refusal: dict[str, str] | None = None
    algorithm: str = "RS256"
    #: What it signs with instead of its key.
    signs_with: Any = None
    kid: str = "first"
    key: rsa.RSAPrivateKey = field(default_factory=new_key)
    #: The name of this machine that it goes by.
    host: str = "127.0.0.1"
    #: What it was asked for.
    asked: list[str] = field(default_factory=list)

    def __enter__(self) -> Self:
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                provider.get(self)

            def do_POST(self) -> None:
                provider.post(self)

            def log_message(self, *_: Any) -> None:
                pass

        self._codes: dict[str, dict[str, str]] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def issuer(self) -> str:
        return f"http://{self.host}:{self._server.server_port}"

    def rotate(self) -> None:
        """Sign with a new key from now on, and publish that one only."""
        self.key, self.kid = new_key(), f"{self.kid}-next"

    def get(self, handler: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(handler.path)
        self.asked.append(parts.path)
        if parts.path == "/.well-known/openid-configuration":
            _send(handler, 200, self._document())
        elif parts.path == "/keys":
            public = jwt.algorithms.RSAAlgorithm.to_jwk(self.key.public_key(), as_dict=True)
            _send(handler, 200, {"keys": [public | {"kid": self.kid, "use": "sig"}]})
        elif parts.path == "/authorize":
            self._authorize(handler, {k: v[0] for k, v in parse_qs(parts.query).items()})
        else:
            _send(handler, 404, {})

    def _document(self) -> dict[str, Any]:
        return {
            "issuer": self.issuer,
            "authorization_endpoint": f"{self.issuer}/authorize",
            "token_endpoint": f"{self.issuer}/token",
            "jwks_uri": f"{self.issuer}/keys",
        } | self.about

    def _authorize(self, handler: BaseHTTPRequestHandler, query: dict[str, str]) -> None:
        assert query["response_type"] == "code"
        assert query["client_id"] == CLIENT
        assert query["code_challenge_method"] == "S256"
        assert "openid" in query["scope"].split()
        code = secrets.token_urlsafe()
        self._codes[code] = query
        back = {"code": code} if self.refusal is None else self.refusal
        handler.send_response(302)
        place = f"{query['redirect_uri']}?{urlencode(back | {'state': query['state']})}"
        handler.send_header("location", place)
        handler.end_headers()

    def post(self, handler: BaseHTTPRequestHandler) -> None:
        self.asked.append(handler.path)
        raw = handler.rfile.read(int(handler.headers["content-length"])).decode()
        form = {k: v[0] for k, v in parse_qs(raw).items()}
        begun = self._codes.pop(form.get("code", ""), None)
        challenge = base64.urlsafe_b64encode(
            hashlib.sha256(form.get("code_verifier", "").encode()).digest()
        )
        if not self._knows(handler, form):
            _send(handler, 401, {"error": "invalid_client"})
        elif (
            begun is None
            or form["redirect_uri"] != begun["redirect_uri"]
            or challenge.decode().rstrip("=") != begun["code_challenge"]
        ):
            _send(handler, 400, {"error": "invalid_grant", "error_description": "a wrong code"})
        else:
            token = self._id_token(begun["nonce"])
            _send(handler, 200, {"id_token": token, "access_token": "x", "token_type": "Bearer"})

    def _knows(self, handler: BaseHTTPRequestHandler, form: dict[str, str]) -> bool:
        methods = self.about.get("token_endpoint_auth_methods_supported", ["client_secret_basic"])
        if methods == ["none"]:
            return form.get("client_id") == CLIENT
        if methods == ["client_secret_post"]:
            return (form.get("client_id"), form.get("client_secret")) == (CLIENT, SECRET)
        _, _, pair = handler.headers.get("authorization", "").partition(" ")
        name, _, secret = base64.b64decode(pair).decode().partition(":")
        return (unquote_plus(name), unquote_plus(secret)) == (CLIENT, SECRET)

    def _id_token(self, nonce: str) -> str:
        now = int(time.time())
        usual = {
            "iss": self.issuer,
            "aud": CLIENT,
            "sub": "4711",
            "iat": now,
            "exp": now + 60,
            "nonce": nonce,
            "preferred_username": "grace",
        }
        claims = {name: each for name, each in (usual | self.claims).items() if each is not None}
        key = self.key if self.signs_with is None else self.signs_with
        return jwt.encode(claims, key, self.algorithm, headers={"kid": self.kid})


def _send(handler: BaseHTTPRequestHandler, status: int, content: dict[str, Any]) -> None:
    raw = json.dumps(content).encode()
    handler.send_response(status)
    handler.send_header("content-type", "application/json")
    handler.send_header("content-length", str(len(raw)))
    handler.end_headers()
    handler.wfile.write(raw)
