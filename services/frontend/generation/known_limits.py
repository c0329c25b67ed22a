"""Makes the limits of the served model, from the pipeline that serves it or from the last pipeline
that served it."""

from services.frontend.link.known_pipeline import KnownPipeline
from services.frontend.request.limits import ModelLimits
from services.frontend.request.pipeline import ServedPipeline


class KnownLimits:
    """Makes the limits of the model from the current pipeline, or from the last pipeline if there
    is none now."""

    def __init__(
        self, known: KnownPipeline, names: tuple[str, ...], *, strict_max_tokens: bool
    ) -> None:
        """`names` are the names by which clients know the model; empty if the pipeline gives the
        name."""
        self._known = known
        self._names = names
        self._strict_max_tokens = strict_max_tokens

    def describe(self, model: str = "") -> ServedPipeline:
        """Returns the current pipeline, or the last pipeline if there is none now.

        Raises:
            Unavailable: there has been no pipeline yet.
            UnknownModel: `model` is neither empty nor a name of this model.
        """
        pipeline = self._known.last
        self.of(pipeline).check_model(model)
        return pipeline

    def of(self, pipeline: ServedPipeline) -> ModelLimits:
        """Returns the limits of the model that a pipeline serves."""
        return ModelLimits(pipeline, self._names, strict_max_tokens=self._strict_max_tokens)

    def current(self) -> ModelLimits:
        """Returns the limits of the model of the current or last pipeline.

        Raises:
            Unavailable: there has been no pipeline yet.
        """
        return self.of(self.describe())

    def last(self) -> ModelLimits | None:
        """Returns the limits of the model of the current or last pipeline. Returns None if there
        has been no pipeline."""
        return self.current() if self._known.last_model else None
