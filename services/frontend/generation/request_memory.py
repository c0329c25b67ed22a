"""Computes the memory of a request's vectors, and of its prompts after they have been encoded into
tokens. The memory of the request itself is counted when the request arrives."""

from array import array
from collections.abc import Sequence

from services.frontend.generation.encoded_prompt import EncodedPrompt
from services.frontend.request.generation_request import GenerationOptions
from services.frontend.request.logprobs import LOGPROB_BYTES

SUBMISSION_TOKEN_BYTES = 2 * array("I").itemsize
"""Bytes of memory that a prompt token takes in each submission that the scheduler has at a time:
once in the submission, and once in the copy that is sent."""


VECTOR_BYTES = 512
"""Bytes of memory that a vector takes besides its numbers."""

N_WRITTEN = 32
"""Factor by which writing a vector as text takes more memory than the numbers of the vector: they
become Python objects, and then text."""


def vector_bytes(n_vectors: int, n_values: int) -> int:
    """Returns the approximate memory, in bytes, of the vectors (embeddings or scores) of a request,
    including the memory for writing one vector at a time as text."""
    number_bytes = array("f").itemsize * n_values
    return n_vectors * (VECTOR_BYTES + number_bytes) + N_WRITTEN * number_bytes


def encoded_bytes(
    prompts: Sequence[EncodedPrompt], options: GenerationOptions, *, max_at_once: int
) -> int:
    """Returns the approximate memory, in bytes, that a request takes after its prompts have been
    encoded. The memory that was counted when the request arrived is not included. The scheduler has
    at most `max_at_once` answers of the request at a time."""
    n_answers = len(prompts) * options.n_generated
    n_grammar_bytes = sum([len(prompt.answer_format.grammar) for prompt in prompts])
    return (
        _token_bytes(prompts, options.n_generated, max_at_once=max_at_once)
        + _prompt_logprob_bytes(prompts, options)
        + options.n_bytes * min(n_answers, max_at_once)
        + n_grammar_bytes * (1 + min(options.n_generated, max_at_once))
    )


def _token_bytes(prompts: Sequence[EncodedPrompt], n: int, *, max_at_once: int) -> int:
    """Returns the approximate memory, in bytes, of the tokens of `prompts` and of the copies of the
    tokens for the scheduler. If the client sent a prompt as tokens, only the copies are counted,
    because the tokens were counted when the request arrived. It is assumed that the copies of the
    longest prompts exist at the same time. Each prompt has `n` answers."""
    n_packed = sum(
        len(prompt.token_ids) for prompt in prompts if not isinstance(prompt.prompt, tuple)
    )
    lengths = sorted((len(prompt.token_ids) for prompt in prompts), reverse=True)
    n_copied, n_left = 0, max_at_once
    for length in lengths:
        n_copied += length * min(n, n_left)
        n_left -= min(n, n_left)
    return array("I").itemsize * n_packed + SUBMISSION_TOKEN_BYTES * n_copied


def _prompt_logprob_bytes(prompts: Sequence[EncodedPrompt], options: GenerationOptions) -> int:
    """Returns the approximate memory, in bytes, of the log-probabilities of prompt tokens that the
    scheduler will send with the answers."""
    if options.n_prompt_logprobs is None:
        return 0
    n_numbers = (1 + options.n_prompt_logprobs) * options.n_generated
    return LOGPROB_BYTES * n_numbers * sum(len(prompt.token_ids) for prompt in prompts)
