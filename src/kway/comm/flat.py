"""The gradients of a model as one flat vector for each dtype, with flags and scalars behind them."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from kway.comm.apart import Apart, can_lie_apart, lies_like
from kway.comm.rows import as_real, from_rows, has_rows, write

Tensor = torch.Tensor
# Number of a vector, and the entries [start, stop) of it.
Piece = tuple[int, int, int]

# Scalars travel with a gradient vector only where its dtype holds counts and losses well enough; the widest first.
_CARRIERS = (torch.float64, torch.float32)
# A float64 is the sum of this many float32.
_PARTS = 3
# Entries: gradients behind flags and numbers start where vector instructions like to start.
_ALIGNMENT = 32


@dataclass(frozen=True)
class _Marks:
    """Flags of a table: above 0 at the rows that anybody looked up, and where anybody had a dense gradient."""

    rows: Tensor
    dense: Tensor


class FlatGradients:
    """Storage for the gradients of ``parameters``, one flag a parameter and ``scalars`` numbers.

    A flag is above 0 where anybody had a gradient for the parameter: a parameter without one keeps
    ``grad = None``, since a zero gradient would move it by momentum and decay. ``vectors`` is what gets
    summed; flags and numbers lie at the front of the one with number ``carrier``, and ``pieces`` says where each
    parameter lies. Sparse gradients lie there with their zeros. Those of the parameters named in ``tables`` are
    handed out sparse again: they have a flag a row. ``beside``: parameters of the same model whose gradients
    travel otherwise. ``large_apart``: large gradients lie in no vector but in ``apart``: each
    has a number of its own in ``pieces``, behind those of ``vectors``, and ``homes`` says beside which vector it
    travels.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        scalars: int,
        tables: Collection[torch.nn.Parameter] = (),
        beside: Collection[torch.nn.Parameter] = (),
        large_apart: bool = False,
    ) -> None:
        self.parameters = list(parameters)
        reals = [as_real(parameter.detach()) for parameter in self.parameters]
        others = [as_real(parameter.detach()) for parameter in beside]
        device = next((real.device for real in [*reals, *others]), torch.device("cpu"))
        kinds = [_dtype_of(parameter) for parameter in self.parameters]
        dtypes = [*kinds, *(real.dtype for real in others)]
        carrier = next((dtype for dtype in _CARRIERS if dtype in dtypes), torch.float32)
        wanted = {id(table) for table in tables}
        marked = {place: len(p) for place, p in enumerate(self.parameters) if id(p) in wanted}
        parts = 1 if carrier == torch.float64 else _PARTS
        sizes = [len(self.parameters), *(rows + 1 for rows in marked.values()), parts * scalars]
        lengths = dict.fromkeys([carrier, *kinds], 0)
        # They lie at the front: backward reaches the last parameters first, and these are known after it.
        lengths[carrier] = -(-sum(sizes) // _ALIGNMENT) * _ALIGNMENT
        self.apart = Apart(
            {
                place: parameter
                for place, parameter in enumerate(self.parameters)
                if large_apart and place not in marked and can_lie_apart(parameter)
            }
        )
        places = []
        for place, (parameter, real, kind) in enumerate(zip(self.parameters, reals, kinds, strict=True)):
            if place in self.apart:
                places.append(0)
                continue
            # A complex number starts at an even place: only there can pairs of reals be seen as one.
            lengths[kind] += lengths[kind] % 2 if parameter.is_complex() else 0
            places.append(lengths[kind])
            lengths[kind] += real.numel()
        store = {dtype: torch.zeros(size, dtype=dtype, device=device) for dtype, size in lengths.items()}
        self.vectors = list(store.values())
        numbers = {dtype: number for number, dtype in enumerate(store)}
        self.carrier = numbers[carrier]
        self.homes = list(range(len(store)))
        self.pieces: list[Piece] = []
        for place, (real, start, kind) in enumerate(zip(reals, places, kinds, strict=True)):
            number = numbers[kind]
            if place in self.apart:
                self.homes.append(number)
                number = len(self.homes) - 1
            self.pieces.append((number, start, start + real.numel()))
        self._front = store[carrier][: sum(sizes)]
        self.flags, *marks, scalar_parts = torch.split(self._front, sizes)
        self._scalars = scalar_parts.view(parts, scalars)
        self._raised = torch.ones_like(self.flags)
        self._rest = torch.zeros((parts - 1) * scalars, dtype=carrier, device=device)
        self._marks = {place: _Marks(m[:-1], m[-1:]) for place, m in zip(marked, marks, strict=True)}
        self._views = {}
        for place, (parameter, real, start, kind) in enumerate(
            zip(self.parameters, reals, places, kinds, strict=True)
        ):
            if place not in self.apart:
                piece = _shaped(store[kind][start : start + real.numel()], real)
                self._views[place] = torch.view_as_complex(piece) if parameter.is_complex() else piece

    @property
    def nbytes(self) -> int:
        """Bytes of the vectors."""
        return sum(vector.nbytes for vector in self.vectors)

    @property
    def parts(self) -> Tensor:
        """What adds up to ``scalars``, shape (parts, scalars), where it lies."""
        return self._scalars

    @property
    def scalars(self) -> Tensor:
        """The numbers, in float64: exact where each is that of one rank alone, and 0 on the others."""
        return self._scalars.sum(0, dtype=torch.float64)

    def collect(self, scalars: Tensor, counts: bool = True) -> bool:
        """Copy the gradients and ``scalars`` in; return whether every parameter had a gradient that counts.

        ``counts=False``: what this rank has is a zero that must not make a parameter look used.
        """
        self.copy_in(range(len(self.parameters)), counts)
        return self.note(scalars, counts)

    def copy_in(self, places: Iterable[int], counts: bool = True) -> None:
        """Copy the gradients of some parameters in that lie in vectors; zeros where there is none that counts."""
        views, grads, empty = [], [], []
        whole: dict[int, Tensor] = {}
        for place in sorted(set(places).difference(self.apart)):
            grad, view = self.parameters[place].grad, self._views[place]
            if grad is None or not counts:
                empty.append(view)
            elif grad.is_sparse:
                write(grad, view)
            elif lies_like(grad, view):
                if grad.data_ptr() == view.data_ptr():
                    continue  # backward has added to what was handed out
                whole[place] = grad.detach().as_strided((grad.numel(),), (1,))
            else:
                views.append(view)
                grads.append(grad)
        if empty:
            torch._foreach_zero_(empty)
        if views:
            torch._foreach_copy_(views, grads)
        # What lies side by side is written by one kernel that keeps all of a device busy, which copies of single
        # tensors do not.
        for number, start, stop, run in _runs(whole, self.pieces):
            torch.cat(run, out=self.vectors[number][start:stop])

    def note(self, scalars: Tensor, counts: bool = True) -> bool:
        """Write flags and ``scalars``; return whether every parameter had a gradient that counts."""
        present = [parameter.grad is not None for parameter in self.parameters]
        complete = all(present) and counts
        if complete and not self._marks and scalars.dtype == self.vectors[self.carrier].dtype:
            # All of the front at once, for the same reason.
            torch.cat([self._raised, scalars, self._rest], out=self._front)
            return complete
        if complete:
            self.flags.fill_(1.0)
        else:
            self.flags.copy_(torch.tensor([float(there and counts) for there in present]))
        for place, marks in self._marks.items():
            self._mark(marks, self.parameters[place].grad if counts else None)
        self._write(scalars)
        return complete

    def hand_out(self, complete: bool = False) -> None:
        """Make every gradient a view into the vectors, or ``None`` where no flag is up.

        ``complete``: all flags are known to be up, so that nothing has to be read back. A table gets the rows
        that are marked, copied out of the vectors.
        """
        used = [True] * len(self.parameters) if complete else (self.flags > 0).tolist()
        for place, (parameter, there) in enumerate(zip(self.parameters, used, strict=True)):
            grad = self.apart.given(place) if place in self.apart else self._views[place]
            if there and place in self._marks:
                grad = self._table(self._marks[place], grad)
            parameter.grad = grad if there else None
        self.apart.forget()

    def divide_(self, divisor: Tensor) -> None:
        """Divide all gradients by a scalar tensor, in place (flags and scalars have been read by now)."""
        for vector in self.vectors:
            vector.div_(divisor)
        self.apart.divide_(divisor)
        for place in self._marks:
            grad = self.parameters[place].grad
            if grad is not None and grad.is_sparse:
                as_real(grad.values()).div_(divisor)

    def _write(self, scalars: Tensor) -> None:
        if scalars.dtype == torch.float32 or len(self._scalars) == 1:
            self._scalars.zero_()
            self._scalars[0].copy_(scalars)
            return
        rest = scalars.double()
        for part in self._scalars:
            part.copy_(rest)
            rest = (rest - part.double()).masked_fill(~part.isfinite(), 0)

    @staticmethod
    def _mark(marks: _Marks, grad: Tensor | None) -> None:
        marks.rows.zero_()
        marks.dense.fill_(float(grad is not None and not has_rows(grad)))
        if grad is not None and has_rows(grad):
            marks.rows.index_fill_(0, grad._indices()[0], 1.0)

    @staticmethod
    def _table(marks: _Marks, view: Tensor) -> Tensor:
        if bool(marks.dense > 0):
            return view
        rows = (marks.rows > 0).nonzero().squeeze(1)
        return from_rows(rows, view[rows], view)


def _dtype_of(parameter: torch.nn.Parameter) -> torch.dtype:
    """Return the dtype of a parameter's gradient, or of its parts: its own, but where ``grad_dtype`` says otherwise."""
    wanted: torch.dtype = getattr(parameter, "grad_dtype", parameter.dtype)
    return wanted.to_real() if wanted.is_complex else wanted


def _runs(found: dict[int, Tensor], pieces: Sequence[Piece]) -> Iterator[tuple[int, int, int, list[Tensor]]]:
    """Yield (vector, start, stop, tensors) for neighbours without a gap between them. ``found``: by place, in order."""
    run: list[Tensor] = []
    number = start = stop = -1
    for place, tensor in found.items():
        if run and pieces[place][:2] != (number, stop):
            yield number, start, stop, run
            run = []
        if not run:
            number, start, _ = pieces[place]
        run.append(tensor)
        stop = pieces[place][2]
    if run:
        yield number, start, stop, run


def _shaped(piece: Tensor, like: Tensor) -> Tensor:
    """See a flat piece as a tensor like another, with its strides where these leave no gap: kernels like them equal."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    wanted = formats.get(like.dim())
    if wanted is not None and not like.is_contiguous() and like.is_contiguous(memory_format=wanted):
        return piece.as_strided(like.shape, like.stride())
    return piece.view(like.shape)
