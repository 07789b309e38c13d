"""A validating webhook for Kubernetes: jobs that say what they train start only where that fits.

    python webhook.py pools.yaml --certificate tls.crt --key tls.key

A Job (or Pod) says it in its annotation ``memplan/request``: YAML in the words of ``memplan.estimate``. Without the
annotation it is let through, with a warning. ``kubernetes.yaml`` beside this file registers it.
"""

import argparse
import json
import ssl
import subprocess
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ANNOTATION = "memplan/request"
SECONDS = 8
"""Below the API server's own patience, ``timeoutSeconds``."""
MAX_BYTES = 3 << 20
"""What the API server itself takes of a request is 3 MiB."""
ADMITTED, REFUSED = 0, 5
"""Exit codes of ``memplan admit``; all others say that it could not be judged."""


def review(body: bytes, pools: str) -> dict[str, Any]:
    """The answer to an AdmissionReview."""
    asked = json.loads(body)["request"]
    answer = {"uid": asked["uid"], **judged(asked.get("object") or {}, pools)}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": answer}


def judged(job: dict[str, Any], pools: str) -> dict[str, Any]:
    """Whether the job may start."""
    annotations = (job.get("metadata") or {}).get("annotations") or {}
    request = annotations.get(ANNOTATION)
    if request is None:
        return {"allowed": True, "warnings": [f"not judged: there is no annotation {ANNOTATION}"]}
    command = ["memplan", "admit", "-", "--pools", pools, "--format", "json"]
    try:
        done = subprocess.run(
            command, input=request, text=True, capture_output=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"allowed": True, "warnings": ["memplan: not judged in time"]}
    if done.returncode not in (ADMITTED, REFUSED):
        return denied(done.stderr.strip().removeprefix("memplan: error: "))
    found = json.loads(done.stdout)
    if not found["admitted"]:
        return denied(found["reason"])
    asked = num_gpus(job)
    if asked and asked != found["needs"]["num_gpus"]:
        return denied(
            f"{ANNOTATION} is of {found['needs']['num_gpus']} GPUs, and the job takes {asked}"
        )
    return {"allowed": True, "warnings": [f"memplan: {found['reason']}"]}


def denied(reason: str) -> dict[str, Any]:
    """A refusal that kubectl prints."""
    return {"allowed": False, "status": {"code": 403, "message": f"memplan: {reason}"}}


def num_gpus(job: dict[str, Any]) -> int:
    """GPUs that the job asks for, over all its pods; 0 where it asks for none."""
    spec = job.get("spec") or {}
    pod = (spec.get("template") or {}).get("spec") or spec
    limits = [
        (each.get("resources") or {}).get("limits") or {} for each in pod.get("containers") or []
    ]
    kinds = ("nvidia.com/gpu", "amd.com/gpu", "gpu.intel.com/xe")
    each_pod = sum(int(limit.get(kind, 0)) for limit in limits for kind in kinds)
    return each_pod * int(spec.get("parallelism", 1))


class Handler(BaseHTTPRequestHandler):
    """One AdmissionReview a request."""

    pools = ""

    def do_POST(self) -> None:
        """Answer it; what is none is a bad request."""
        try:
            length = int(self.headers.get("Content-Length", ""))
            if not 0 < length <= MAX_BYTES:
                self.send_error(413)
                return
            answer = json.dumps(review(self.rfile.read(length), self.pools)).encode()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self.send_error(400, "no AdmissionReview")
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


def main() -> None:
    """Serve until it is stopped."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pools", help="the platform's pools, in YAML")
    parser.add_argument("--port", type=int, default=8443)
    parser.add_argument("--certificate", help="TLS, which the API server asks for")
    parser.add_argument("--key")
    options = parser.parse_args()
    Handler.pools = options.pools
    server = ThreadingHTTPServer(("", options.port), Handler)
    if options.certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(options.certificate, options.key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    print(f"listening on port {server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
