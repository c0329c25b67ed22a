"""Asks a frontend whether it serves, and for four tokens where it wants no API key.

python answers.py URL

The certificate of a frontend is not examined: this is no client with a secret to lose.
"""

import http.client
import json
import ssl
import sys
import urllib.error
import urllib.request
from typing import Any

url = sys.argv[1]
unverified = ssl.create_default_context()
unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE


def answer(path: str, body: object = None) -> Any:
    """Returns the answer to a GET, or to a POST of `body`."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + path, data, headers)
    with urllib.request.urlopen(request, timeout=60, context=unverified) as response:
        return json.load(response)


try:
    with urllib.request.urlopen(f"{url}/ready", timeout=60, context=unverified):
        print("a frontend takes requests")
    models = [model["id"] for model in answer("/v1/models")["data"]]
    for model in models:
        made = answer("/v1/completions", {"model": model, "prompt": "Hello", "max_tokens": 4})
        print(f"{model} answers: {made['choices'][0]['text']!r}")
except urllib.error.HTTPError as error:
    if error.code != 401:
        sys.exit(f"{error.url} answers {error.code}: {error.read().decode(errors='replace')}")
    print("a frontend wants an API key")
except (OSError, http.client.HTTPException) as error:
    sys.exit(f"{url} does not answer: {error}")
