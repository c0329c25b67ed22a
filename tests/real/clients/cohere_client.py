"""What users of Cohere's client write: `cohere_client.py CASE URL` prints as JSON what it
returns."""

import json
import sys
from typing import Any

import cohere

QUERY = "How tall is a giraffe?"
DOCUMENTS = ["A lien is a right.", "A giraffe is tall.", "Nothing."]


def rerank(url: str) -> Any:
    """The indices and scores of documents, by both versions of the client."""
    found = []
    for client in (cohere.Client("none", base_url=url), cohere.ClientV2("none", base_url=url)):
        answer = client.rerank(model="reranker", query=QUERY, documents=DOCUMENTS, top_n=2)
        found.append([[one.index, one.relevance_score] for one in answer.results])
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(globals()[sys.argv[1]](sys.argv[2])) + "\n")
