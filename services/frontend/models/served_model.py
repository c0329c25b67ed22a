"""One model that this frontend serves, with all that belongs to this model alone: tokenizer, chat
template, parsers and limits (`GenerationService`), the link to the schedulers of the model
(`SchedulerClient`), the events for viewers (`ViewFeed`), and whether requests get tokens
(`ServingWatch`)."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable

from opentelemetry.trace import Tracer

from services.common import rpc
from services.common.gguf.header import model_name
from services.common.serving import ServingWatch
from services.common.tokenizer_files.find import read_tokenizer, tokenizer_file
from services.frontend.generation.admission import Admission
from services.frontend.generation.generation_service import GenerationService
from services.frontend.generation.model_profile import ModelProfile, model_created_at
from services.frontend.generation.receipts import ReceiptIssuer
from services.frontend.generation.service_limits import ServiceLimits
from services.frontend.link.scheduler_client import SchedulerClient
from services.frontend.model_settings import ModelSettings
from services.frontend.observing.metrics import FrontendMetrics, ModelFigures
from services.frontend.request.generation_defaults import GenerationDefaults
from services.frontend.request.vector_defaults import VectorDefaults
from services.frontend.settings import FrontendSettings
from services.frontend.text.chat_template import ChatTemplate
from services.frontend.text.pair_format import PairFormat
from services.frontend.text.prompt_encoder import TextLimits
from services.frontend.text.text_threads import TextThreads
from services.frontend.text.tokenizer import Tokenizer
from services.frontend.watching.subscription import Subscription
from services.frontend.watching.view_feed import ViewFeed
from services.receipts.key_file import KeyFile


class ServedModel:
    """A model that this frontend serves."""

    def __init__(
        self,
        model: ModelSettings,
        settings: FrontendSettings,
        *,
        admission: Admission,
        threads: TextThreads,
        connect: rpc.Connect,
        tracer: Tracer,
        metrics: FrontendMetrics,
        keys: KeyFile | None = None,
    ) -> None:
        """Reads the files of the model. `keys` sign the receipts of answers; without keys there are
        no receipts.

        Raises:
            OSError: a file is missing or cannot be read.
            ValueError: a file is wrong.
        """
        self._fallback_label = model_name(model.path)
        self.watch = ServingWatch(
            trouble=lambda: self.scheduler.pipeline.trouble,
            details=lambda: self.scheduler.pipeline.shortfall,
            n_waiting=lambda: self.scheduler.n_requests + self.service.n_waiting,
        )
        self.feed = ViewFeed(
            Subscription(model.scheduler, connect=connect),
            max_viewers=settings.max_viewers,
            refusals=admission.refusals,
        )
        self.scheduler = SchedulerClient(
            model.scheduler,
            connect=connect,
            resume_s=settings.resume_s,
            on_tokens=self.watch.note_progress,
            refusals=admission.refusals,
        )
        defaults = GenerationDefaults()
        if settings.generation_config == "auto":
            defaults = GenerationDefaults.from_directory(model.path)
        self.defaults = defaults
        """The checkpoint's own defaults for options that a request leaves out."""
        self.service = GenerationService(
            Tokenizer.from_model(model.path),
            self.scheduler,
            profile=_profile_of(model, settings, defaults, keys),
            limits=_limits_of(model, settings),
            admission=admission,
            threads=threads,
            tracer=tracer,
            metrics=metrics,
        )
        self._names = model.names

    @property
    def names(self) -> tuple[str, ...]:
        """Names by which clients know the model. Answers show the first name. If the settings give
        no name, the only name is the one that the last pipeline reported or, before the first
        pipeline, the name of the model's files."""
        last_model = self.scheduler.pipeline.last_model
        return self._names or (last_model or self._fallback_label,)

    @property
    def figures(self) -> ModelFigures:
        """The present figures of the model for its metrics."""
        return ModelFigures(
            name=self.names[0],
            is_up=self.scheduler.pipeline.is_open,
            n_held=self.service.n_waiting + self.scheduler.n_held,
            n_resubmitted=self.scheduler.n_resubmitted,
            n_viewers=self.feed.n_viewers,
        )

    async def run(self, tell: Callable[[bool], Awaitable[None]]) -> None:
        """Keeps the link to the scheduler open, and serves viewers, until cancelled. `tell` is
        called twice a second with whether requests to this model get tokens."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.scheduler.run())
            tasks.create_task(self.watch.run(tell))
            tasks.create_task(self.feed.run())


def _profile_of(
    model: ModelSettings,
    settings: FrontendSettings,
    defaults: GenerationDefaults,
    keys: KeyFile | None,
) -> ModelProfile:
    template = ChatTemplate.from_model(model.path)
    vectors = VectorDefaults.from_directory(model.path)
    return ModelProfile(
        names=model.names,
        defaults=defaults,
        chat_template=template,
        tool_parser=model.tool_parser,
        reasoning_parser=model.reasoning_parser,
        additional_properties=settings.additional_properties,
        tokenizer_file=tokenizer_file(model.path),
        created=model_created_at(model.path),
        vectors=vectors,
        pairs=PairFormat(model.pair_template, has_classifier=vectors.has_classifier),
        receipts=None if keys is None else _issuer_of(model, settings, template, keys),
    )


def _issuer_of(
    model: ModelSettings,
    settings: FrontendSettings,
    template: ChatTemplate | None,
    keys: KeyFile,
) -> ReceiptIssuer:
    tokenizer = read_tokenizer(tokenizer_file(model.path))
    return ReceiptIssuer(
        keys=keys,
        tokenizer=hashlib.sha256(tokenizer.encode()).hexdigest(),
        template=None if template is None else template.digest,
        are_always_made=settings.receipts == "always",
        hide_prompts=settings.receipt_prompts == "digest",
    )


def _limits_of(model: ModelSettings, settings: FrontendSettings) -> ServiceLimits:
    return ServiceLimits(
        hold_s=settings.hold_s,
        wake_s=settings.wake_s,
        max_request_s=settings.max_request_s,
        strict_max_tokens=settings.strict_max_tokens,
        texts=TextLimits(
            max_characters=settings.n_prompt_characters(model.path),
            render_limit_s=settings.render_limit_s,
        ),
    )
