"""A server that speaks vLLM's protocol as TRL's ``vllm_mode="server"`` uses it, on loopback, with a model of its own.

TRL's own client talks to it by HTTP: the server samples with its copy of the policy, answers with token ids and their
log-probs, and takes part in every update of weights. vLLM itself is not needed. What is replaced in TRL is what needs
CUDA: joining the group of NCCL and the broadcast through it (tensors travel in a queue instead, in the order and with the
names, types and shapes that TRL announced by HTTP).
"""

import json
import queue
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from trl.generation import vllm_client, vllm_generation

METRICS = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0"}} 0.0
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{{engine="0"}} {tokens}
"""
CONFIG = {
    "vllm_config": {
        "weight_transfer_config": {"backend": "nccl"},
        "model_config": {"logprobs_mode": "processed_logprobs"},
    }
}


class VLLMServer:
    """``deaf``: the updates of weights, counted from 0, whose tensors are received and not used. ``noise``: added to all."""

    def __init__(self, model, *, noise=0.0, deaf=()):
        self.model = model.eval()
        self.noise, self.deaf = noise, deaf
        self.asked = []
        """Paths, in order."""
        self.weights = queue.Queue()
        self.updates, self.tokens = 0, 0
        self._generator = torch.Generator().manual_seed(7)
        self._parameters = dict(self.model.named_parameters())
        self.lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()

    def close(self):
        self._http.shutdown()
        self._http.server_close()

    def _handler(server):  # noqa: N805  (a closure: its own self is the request's)
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                path = self.path.partition("?")[0]
                text = (
                    METRICS.format(tokens=server.tokens) if path == "/metrics" else json.dumps(server.answers()[path])
                )
                self.reply(text.encode())

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
                with server.lock:
                    server.asked.append(self.path)
                    answer = server.orders()[self.path](body)
                self.reply(json.dumps(answer or {}).encode())

            def reply(self, content):
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args):
                pass

        return Handler

    def answers(self):
        return {
            "/health": {},
            "/v1/models": {"data": [{"id": "policy"}]},
            "/server_info": CONFIG,
            "/get_world_size": {"world_size": 1},
        }

    def orders(self):
        return {
            "/init_weight_transfer_engine": lambda body: None,
            "/start_weight_update": lambda body: None,
            "/update_weights": lambda body: self.update(**body["update_info"]),
            "/finish_weight_update": lambda body: None,
            "/reset_prefix_cache": lambda body: {"success": True},
            "/v1/completions": self.complete,
        }

    def update(self, names, dtype_names, shapes):
        """Take as many tensors from the group as were announced."""
        received = [self.weights.get(timeout=60) for _ in names]
        assert [(str(t.dtype), list(t.shape)) for t in received] == [
            (f"torch.{dtype}", shape) for dtype, shape in zip(dtype_names, shapes, strict=True)
        ]
        assert set(names) == set(self._parameters)
        if self.updates not in self.deaf:
            with torch.no_grad():
                for name, tensor in zip(names, received, strict=True):
                    off = self.noise * torch.randn(tensor.shape, generator=self._generator) if self.noise else 0.0
                    self._parameters[name].copy_(tensor + off)
        self.updates += 1

    def complete(self, body):
        prompts = [prompt for prompt in body["prompt"] for _ in range(body["n"])]
        return {"choices": [self._choice(prompt, body) for prompt in prompts]}

    @torch.no_grad()
    def _choice(self, prompt, body):
        ids, logps = [], []
        while len(ids) < body["max_tokens"]:
            logits = self.model(input_ids=torch.tensor([prompt + ids])).logits[0, -1]
            logp = (logits / body["temperature"]).log_softmax(-1)
            token = int(torch.multinomial(logp.exp(), 1, generator=self._generator))
            ids.append(token)
            logps.append(float(logp[token]))
            if token == 2:
                break
        self.tokens += len(ids)
        names = [f"token_id:{token}" for token in ids]
        scored = {"tokens": names, "token_logprobs": logps, "top_logprobs": [{n: p} for n, p in zip(names, logps, strict=True)]}  # fmt: skip
        return {"prompt_token_ids": prompt, "token_ids": ids, "logprobs": scored}


@contextmanager
def serving(monkeypatch, model, **kwargs):
    """A server, and TRL as it is where vLLM is installed but for the group of NCCL."""
    server = VLLMServer(model, **kwargs)

    def join(client, device=0):
        assert client.get_server_info()["weight_transfer_config"] is not None
        client.session.post(
            f"{client.base_url}/init_weight_transfer_engine", json={"world": client.get_world_size() + 1}
        )
        client.communicator = server.weights

    def broadcast(iterator, group, src, post_iter_func):
        for item in iterator:
            group.put(post_iter_func(item).detach().clone())

    for module in (vllm_client, vllm_generation):
        monkeypatch.setattr(module, "is_vllm_available", lambda *args, **kwargs: True)
    monkeypatch.setattr(vllm_client, "_HAS_STATEFUL_TRAINER_ENGINE", True)
    monkeypatch.setattr(vllm_client, "_HAS_RESET_PREFIX_CACHE_SUCCESS", True)
    monkeypatch.setattr(vllm_client, "packed_nccl_broadcast_producer", broadcast, raising=False)
    monkeypatch.setattr(vllm_client.VLLMClient, "init_communicator", join)
    try:
        yield server
    finally:
        server.close()
