"""The answers of one call, `n` to each prompt: creates each answer, and makes the message that
submits it to the scheduler.

An answer has an index among all answers of the call, and a name, which is its request id at the
scheduler. A resumed answer begins with the tokens that the client already has.
"""

import secrets
from dataclasses import replace

from orcinus.v1 import sampling_pb2, scheduler_pb2, trace_pb2

from services.common.sampling import INT64_MIN, SamplingParams
from services.common.sampling_proto import to_proto
from services.frontend.generation.answer import Answer
from services.frontend.generation.encoded_call import EncodedCall
from services.frontend.generation.encoded_prompt import EncodedPrompt
from services.frontend.text.incremental_text import IncrementalText
from services.frontend.text.stop_strings import StopStrings


class Answers:
    """Creates the answers of one call, and makes the messages that submit them. Each answer has an
    index, and a name, which is its request id at the scheduler."""

    def __init__(
        self,
        call: EncodedCall,
        *,
        account: scheduler_pb2.Account | None,
        trace: trace_pb2.TraceContext | None,
    ) -> None:
        """`begin` creates the answers later. The scheduler charges the answers to `account`, and
        all services add their spans to the trace `trace`."""
        self.begun: dict[str, Answer] = {}
        """Answers that have begun, by their names."""
        self._call = call
        self._options = call.options
        self._account = account
        self._trace = trace
        self.adapter = call.adapter
        """Adapter that makes the answers; None if the model itself makes them."""
        self._name = call.request_id
        if call.resumption is not None:
            # The stream that broke, or another that resumes it, may still run here.
            self._name += f"-{secrets.token_hex(8)}"
        self._is_uncached = call.is_uncached
        self._n_to_each = call.options.n_generated
        self.n_answers = call.n_answers
        """Number of answers to all prompts together."""

    @property
    def n_tokens(self) -> int:
        """Number of tokens so far, of all answers of the call."""
        return sum([answer.n_tokens for answer in self.begun.values()])

    def name(self, index: int) -> str:
        """Returns the name of an answer, which is its request id at the scheduler."""
        return f"{self._name}-{index}"

    def prompt(self, index: int) -> EncodedPrompt:
        """Returns the prompt of an answer."""
        return self._call.prompts[self.prompt_index(index)]

    def prompt_index(self, index: int) -> int:
        """Returns the index of an answer's prompt among the prompts of the call."""
        return index // self._n_to_each

    def tokens_so_far(self, index: int) -> tuple[int, ...]:
        """Returns the tokens of an answer that the client had received before this call began."""
        resumption = self._call.resumption
        return () if resumption is None else resumption.answers[index].token_ids

    def has_ended(self, index: int) -> bool:
        """Returns whether an answer has begun and ended."""
        answer = self.begun.get(self.name(index))
        return answer is not None and answer.is_finished

    def begin(self, index: int) -> Answer:
        """Creates the answer with this index, adds it to `begun` and returns it."""
        options, prompt = self._options, self.prompt(index)
        is_shown = options.include_stop_str_in_output
        tokenizer = self._call.tokenizer
        if not options.skip_special_tokens:
            tokenizer = tokenizer.with_special_tokens
        answer = self.begun[self.name(index)] = Answer(
            index,
            IncrementalText(tokenizer, prompt.context, marks=prompt.answer_format.marks),
            stops=StopStrings(options.stop, are_shown=is_shown),
            stop_token_ids=frozenset(() if is_shown else prompt.stop_token_ids),
            min_tokens=options.sampling.min_tokens,
            has_scores=options.n_ranked is not None,
            shows_tokens=options.return_token_ids,
            keeps_tokens=options.receipt,
        )
        return answer

    @property
    def stop(self) -> tuple[str, ...]:
        """Stop strings of the call: texts that end an answer."""
        return self._options.stop

    def sampling(self, index: int) -> SamplingParams:
        """Returns the sampling options of an answer: the options of the call, with the seed, the
        stop tokens and the grammar of this answer."""
        params, prompt = self._options.sampling, self.prompt(index)
        return replace(
            params,
            seed=_own_seed(params.seed, index),
            stop_token_ids=prompt.stop_token_ids,
            grammar=prompt.answer_format.grammar or params.grammar,
        )

    def submission(self, index: int) -> scheduler_pb2.Submission:
        """Returns the message that submits an answer. Begins the answer if it has not begun."""
        name, prompt, options = self.name(index), self.prompt(index), self._options
        if name not in self.begun:
            self.begin(index)
        return scheduler_pb2.Submission(
            request_id=name,
            prompt_token_ids=prompt.token_ids,
            # Log-probabilities of the prompt come with a token, also where no token is wanted.
            max_new_tokens=0 if options.wants_vector else max(1, prompt.max_new_tokens),
            wants_vector=options.wants_vector,
            n_logprobs=options.n_ranked if prompt.max_new_tokens else None,
            n_prompt_logprobs=self._n_prompt_logprobs(index, prompt),
            sampling=self._sampling(index, prompt),
            trace=self._trace,
            generated_token_ids=self.tokens_so_far(index),
            account=self._account,
            priority=options.priority,
            cache_salt=options.cache_salt,
            is_uncached=self._is_uncached,
            wants_traits=options.receipt,
            adapter=self.adapter,
        )

    def _n_prompt_logprobs(self, index: int, prompt: EncodedPrompt) -> int | None:
        """Returns how many of the most likely tokens get a log-probability at each position of the
        prompt, besides the prompt's own token. Returns None if no log-probabilities are to be
        computed: the client requests none or has received them already, or the prompt has only one
        token."""
        if len(prompt.token_ids) < 2 or self.tokens_so_far(index):
            return None
        return self._options.n_prompt_logprobs

    def _sampling(self, index: int, prompt: EncodedPrompt) -> sampling_pb2.SamplingParams:
        """Returns the sampling options of an answer as a message: the options of the call, with the
        seed, the stop tokens and the grammar of this answer."""
        params = self._options.sampling
        message = to_proto(params)
        message.seed = _own_seed(params.seed, index)
        message.stop_token_ids[:] = prompt.stop_token_ids
        message.grammar = prompt.answer_format.grammar or params.grammar
        return message


def _own_seed(seed: int, index: int) -> int:
    """Returns `seed + index`, the seed of the answer with this index. The sum wraps around as a
    signed 64-bit integer."""
    return (seed + index - INT64_MIN) % 2**64 + INT64_MIN
