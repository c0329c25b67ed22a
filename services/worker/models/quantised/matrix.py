"""Code that the layouts of quantised matrices share, including the unpacking of 32-bit words."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kernels.weights.groups import MULTIPLE, Bits, GroupForm
from services.worker.models.stored_tensor import GroupedTensor, Spans
from services.worker.models.tensor_files import CheckpointError, Header, TensorFiles
from services.worker.models.weight_format import MatrixFormat
from services.worker.models.weights import pieces

_MIDDLE = 8  # of numbers of four bits, in which fewer bits are kept

WORD_BITS = 32
INT32 = frozenset(("I32",))


class QuantisedMatrix(GroupedTensor):
    """A quantised matrix [n_out, n_in], stored as several tensors whose names begin with the
    module's name."""

    def __init__(
        self, files: TensorFiles, module: str, shape: tuple[int, ...], form: MatrixFormat
    ) -> None:
        self.n_out, self.n_in = shape
        self.form = form
        self.per_word = WORD_BITS // form.bits
        self.has_offsets = form.has_zeros
        self._files = files
        self._module = module

    @property
    def group_size(self) -> int:
        """The number of inputs that share a scale."""
        return self.form.block[1] or max(self.n_in, 1)

    @property
    def n_groups(self) -> int:
        """The number of scales along the inputs."""
        return -(-self.n_in // self.group_size)

    def n_bytes(self, spans: Spans) -> int:
        rows, columns = spans
        return -(-len(rows) * len(columns) * self.form.bits // 8)

    def pieces(self, spans: Spans) -> Iterator[Spans]:
        rows, columns = spans
        for begin, end in pieces(len(rows), len(columns) * 4):
            yield range(rows.start + begin, rows.start + end), columns

    @property
    def middle(self) -> int:
        """The middle of the range of unsigned numbers. It is the zero point of a matrix without
        stored zero points."""
        return 1 << self.form.bits - 1

    def group_form(self, spans: Spans) -> GroupForm | None:
        """Returns the form (bits, group size and values) in which the part `spans` can stay
        quantised, or None if the part must be dequantised.

        If inputs are in several groups, returns None unless `MULTIPLE` divides both the group size
        and the first column of the part. Subclasses also return None if the inputs of a group are
        not neighbours.
        """
        _, columns = spans
        bits: Bits = 4 if self.form.bits <= 4 else 8
        if self.n_groups == 1:
            return GroupForm(bits, max(len(columns), 1))
        size = math.gcd(self.group_size, columns.start)
        return None if size % MULTIPLE else GroupForm(bits, size)

    def as_values(self, numbers: Tensor) -> Tensor:
        """Converts unsigned numbers to the encoding of `GroupedMatrix`."""
        if self.form.bits == 8:
            return (numbers - self.middle).to(torch.int8)
        return (numbers + (_MIDDLE - self.middle)).to(torch.uint8)

    def has(self, suffix: str) -> bool:
        """Returns whether the files have a tensor of this matrix whose name ends in `suffix`."""
        return self._files.find(f"{self._module}.{suffix}") is not None

    def tensor(self, suffix: str, *spans: range) -> Tensor:
        """Reads the index ranges `spans` of the matrix's tensor whose name ends in `suffix`."""
        return self._files.read(f"{self._module}.{suffix}", spans)

    def wrong(
        self, suffix: str, shape: Sequence[int], elements: frozenset[str] = INT32
    ) -> Iterator[str]:
        """Yields a description of the problem if the tensor named `suffix` has a wrong shape or
        element type."""
        name = f"{self._module}.{suffix}"
        header = self._header(suffix)
        if header is None:
            yield f"{name} is missing"
        elif header.shape != tuple(shape):
            yield f"{name} has shape {list(header.shape)}, not {list(shape)}"
        elif header.element not in elements:
            yield f"{name} has element type {header.element}"

    def _header(self, suffix: str) -> Header | None:
        return self._files.header(f"{self._module}.{suffix}") if self.has(suffix) else None

    def check_symmetric(self, suffix: str, is_middle: Tensor) -> None:
        """Checks the zero points in the tensor named `suffix` of a matrix that is symmetric
        according to the settings. `is_middle` has, for each zero point, whether it is the middle of
        the range.

        Raises:
            CheckpointError: a zero point is another number.
        """
        if not is_middle.all():
            raise CheckpointError(
                f"{self._files}: {self._module}.{suffix} has zero points beside the middle, though "
                "the quantization_config says that the matrix is symmetric"
            )

    def wrong_order(self, suffix: str) -> Iterator[str]:
        """Yields a description of the problem if the tensor named `suffix`, which gives the group
        of each input, is wrong.

        The tensor may be missing unless the format requires it.
        """
        if self.form.order == "required" or self._has_order(suffix):
            yield from self.wrong(suffix, (self.n_in,), INT32 | {"I64"})

    def groups(self, columns: range, suffix: str) -> Tensor:
        """Returns the group of each input in `columns`, [n_columns].

        The groups are in the tensor named `suffix` if that tensor is used. Otherwise neighbouring
        inputs form groups. Raises CheckpointError for a group that does not exist.
        """
        if not self._order_counts(suffix):
            return torch.arange(columns.start, columns.stop) // self.group_size
        groups = self.tensor(suffix, columns).long()
        if groups.numel() and not 0 <= groups.min() <= groups.max() < self.n_groups:
            raise CheckpointError(
                f"{self._files}: {self._module}.{suffix} names scales that are not there"
            )
        return groups

    def has_groups_in_order(self, suffix: str) -> bool:
        """Returns whether the inputs of each group, which share a scale, are neighbours."""
        if not self._order_counts(suffix):
            return True
        in_order = torch.arange(self.n_in) // self.group_size
        return torch.equal(self.tensor(suffix, range(self.n_in)).long(), in_order)

    def _order_counts(self, suffix: str) -> bool:
        """Returns whether the tensor named `suffix` gives the group of each input.

        Some writers leave this tensor unset (all zeros or all -1) if the inputs of each group are
        neighbours.
        """
        if self.form.order == "required":
            return True
        if not self._has_order(suffix):
            return False
        return bool((self.tensor(suffix, range(self.n_in)) > 0).any())

    def _has_order(self, suffix: str) -> bool:
        """Returns whether the files have a tensor named `suffix` with at least one number. Some
        writers leave it empty."""
        header = self._header(suffix)
        return header is not None and header.shape != (0,)

    @abstractmethod
    def problems(self, shape: tuple[int, ...]) -> Iterator[str]: ...


def run_of(bits: int) -> int:
    """Returns the smallest number of quantised numbers that fill whole words of 32 bits: 8 numbers
    of 4 bits fill one word, and 32 numbers of 3 bits fill three words."""
    return WORD_BITS // math.gcd(WORD_BITS, bits)


def words_of(span: range, bits: int) -> range:
    """Returns the range of the 32-bit words that hold the numbers with the indices `span`. The
    words contain whole runs of numbers (see `run_of`), so they may hold more numbers."""
    run = run_of(bits)
    n_words = run * bits // WORD_BITS
    return range(span.start // run * n_words, -(-span.stop // run) * n_words)


def unpack(words: Tensor, bits: int) -> Tensor:
    """Unpacks numbers of `bits` bits from words [n, n_words], in order from the lowest bits on. A
    number of 3 bits may begin in one word and end in the next."""
    if WORD_BITS % bits:
        return unpack_bytes(words.contiguous().view(torch.uint8), bits)
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    numbers = (words[:, :, None] >> shifts) & ((1 << bits) - 1)
    return numbers.flatten(1)


def unpack_bytes(stored: Tensor, bits: int) -> Tensor:
    """Unpacks numbers of `bits` bits from bytes [n, n_bytes], in order from the lowest bits on. A
    number may begin in one byte and end in the next. Returns [n, n_bytes * 8 / bits] int64."""
    runs = stored.view(len(stored), -1, bits).long()  # eight numbers each
    joined = (runs << torch.arange(bits) * 8).sum(2)  # [n, n_runs], up to 64 bits
    numbers = joined[:, :, None] >> torch.arange(8) * bits
    return (numbers & ((1 << bits) - 1)).flatten(1)


def numbers_of(numbers: Tensor, span: range, bits: int) -> Tensor:
    """Returns the columns of `numbers` whose indices in the whole tensor are `span`.

    `numbers` must be unpacked from the words `words_of(span, bits)`, which may hold more numbers.
    """
    skipped = span.start % run_of(bits)
    return numbers[:, skipped : skipped + len(span)]


def range_of(groups: Tensor) -> range:
    """Returns the smallest range that contains all of the group indices `groups`."""
    if not groups.numel():
        return range(0)
    return range(int(groups.min()), int(groups.max()) + 1)
