"""What users of LlamaIndex write: `llama_index_client.py CASE URL` prints as JSON what it
returns."""

import json
import sys
from typing import Any

from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.postprocessor.jinaai_rerank import JinaRerank

QUERY = "How tall is a giraffe?"
DOCUMENTS = ["A lien is a right.", "A giraffe is tall.", "Nothing."]


def embed(url: str) -> Any:
    """The vectors of documents."""
    model = OpenAILikeEmbedding(model_name="embedder", api_base=f"{url}/v1", api_key="none")
    return model.get_text_embedding_batch(DOCUMENTS)


def rerank(url: str) -> Any:
    """The texts and scores of documents, by the client for Jina."""
    ranking = JinaRerank(model="reranker", api_key="none", base_url=f"{url}/v1", top_n=2)
    nodes = [NodeWithScore(node=TextNode(text=text), score=0.0) for text in DOCUMENTS]
    ranked = ranking.postprocess_nodes(nodes, query_str=QUERY)
    return [[DOCUMENTS.index(one.node.get_content()), one.score] for one in ranked]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(globals()[sys.argv[1]](sys.argv[2])) + "\n")
