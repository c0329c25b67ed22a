"""The endpoints that compare texts: relevance scores of pairs, in the form of vLLM, and documents
ordered by relevance to a query, in the forms of Jina, Cohere and vLLM. This package does not know
how scores are computed."""
