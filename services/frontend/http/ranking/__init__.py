"""The endpoints that compare texts: scores of pairs, in the form of vLLM, and the order of
documents for a query, in the forms of Jina, Cohere and vLLM. This package does not know how scores
are computed."""
