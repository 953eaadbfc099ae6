"""A step with other number formats than it was recorded in: what changes for its operators, and where casts stand.

Formats are chosen for operators by name. What has no format of its own follows its neighbours: an operator that can do
with any (additions, activations, dropout, picking rows, halo exchanges) takes that of its inputs if they agree, and the
one it was recorded in otherwise; its gradient takes the one it has, as that of a view does (what `split` has divided is
joined in its own format). Where two ends of an edge differ stands a cast.
Source of the rule: QSync (Zhao et al., IPDPS 2024), with gradients as torch's autocast makes them.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nugnn.planning.operator_costs import item_bytes
from nugnn.planning.trace import StepTrace
from nugnn.planning.trace_records import Dim, OperatorRecord, Storage, TensorRecord, formula, parsed

FLOATING = ("float64", "float32", "bfloat16", "float16")
"""Formats that operators may be given, as torch names them."""
_FOLLOWS = frozenset(("elementwise", "reduction", "copy", "rows", "exchange", "metadata"))
"""Kinds that can do with any format."""
_BATCH_NORM = "batch_norm"
"""A call of many records where its statistics are those of all ranks; all have their format."""
_FOLLOWS_IN_LOSS = frozenset(("rows", "metadata"))
_GRADIENT = "/gradient"
"""Ends the name of the record in which a parameter gets its gradient."""
CAST = "aten._to_copy"


def with_formats(trace: StepTrace, formats: Mapping[str, str]) -> StepTrace:
    """``trace`` as it would be with these formats.

    Parameters, their gradients, optimizer state and inputs are stored as they were. A parameter is cast once in a step,
    an activation once for each operator that reads it; their casts are what is kept for backward.

    Args:
        trace: Dimensions may be formulas.
        formats: Operator's name, as in the trace, to one of `FLOATING`: in which it computes, and gives its result and
            its gradients.

    Raises:
        ValueError: There is no operator of a name, or a format is none of `FLOATING`.
    """
    names = {record.name for record in trace.operators}
    for name, dtype in formats.items():
        if name not in names:
            near = difflib.get_close_matches(name, sorted(names), n=1)
            raise ValueError(f"the trace has no operator {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        if dtype not in FLOATING:
            raise ValueError(f"{name}: {dtype!r} is no format that can be asked for; choose {', '.join(FLOATING)}")
    return _Retyped(trace, formats).trace()


@dataclass
class _Kept:
    """A storage while it is retyped: its dtype now, the cast that stands for it, and what has become of it."""

    dtype: str
    record: Storage
    last_use: int
    is_read_as_cast: bool = False
    is_of_parameter: bool = False


@dataclass
class _Retyped:
    given: StepTrace
    formats: Mapping[str, str]
    _operators: list[OperatorRecord] = field(default_factory=list)
    _storages: list[_Kept] = field(default_factory=list)
    _new_number: list[int] = field(default_factory=list)
    """Of each record of the given trace."""
    _chosen: dict[str, str] = field(default_factory=dict)
    """What operators without a format of their own have taken in forward, views among them, by name."""
    _logits: dict[str, str] = field(default_factory=dict)
    """In what losses of ours have read their logits, by name; records of backward lack what was saved for it."""
    _casts: dict[tuple[int, str, str, int], int] = field(default_factory=dict)
    """Storages that hold casts: by storage, format, reader and how often the storage had been written."""
    _writes: dict[int, int] = field(default_factory=dict)
    _writer: dict[int, int] = field(default_factory=dict)
    _stands_for: dict[int, int] = field(default_factory=dict)
    """Storages in whose place others are read from some record on: gradients in the format of their parameter."""

    def trace(self) -> StepTrace:
        self._storages = [_Kept(s.dtype, s, -1) for s in self.given.storages]
        for record in self.given.operators:
            self._add(record)
        if len(self._operators) == len(self.given.operators) and self._is_as_it_was():
            return self.given
        storages = tuple(self._storage(number, kept) for number, kept in enumerate(self._storages))
        return self.given.model_copy(update={"operators": tuple(self._operators), "storages": storages})

    def _is_as_it_was(self) -> bool:
        return all(kept.dtype == kept.record.dtype for kept in self._storages)

    # -- records -------------------------------------------------------------------------------------------------------

    def _add(self, record: OperatorRecord) -> None:
        recorded = self._recorded_format(record)
        wanted = None if recorded is None else self._format(record, recorded)
        inputs, moved = [], {}
        for x in record.inputs:
            now = self._now(x)
            if wanted is not None and x.dtype == recorded and now.dtype != wanted and not self._converts(record):
                cast = self._cast(now, wanted, record)
                moved[x.storage] = cast.storage
                now = cast
            inputs.append(self._cast_seen(record, now))
        number = len(self._operators)
        outputs = tuple(
            self._cast_seen(record, self._output(x, wanted, recorded, number, record, moved)) for x in record.outputs
        )
        depends_on = {self._new_number[i] for i in record.depends_on}
        depends_on |= {self._writer[x.storage] for x in inputs if x.storage >= len(self.given.storages)}
        changes: dict[str, Any] = {"inputs": tuple(inputs), "outputs": outputs, "depends_on": tuple(sorted(depends_on))}
        if wanted is not None and wanted != recorded:
            changes |= self._other_sizes(record, str(recorded), wanted)
        if record.kind == "metadata" and record.phase != "backward":
            for x in outputs[:1]:
                if x.dtype in FLOATING:
                    self._chosen.setdefault(record.name, x.dtype)
        for x in (*inputs, *outputs):
            if x.storage >= 0:
                self._storages[x.storage].last_use = number
        for x in outputs:
            if x.storage >= 0 and record.kind != "metadata":
                self._writes[x.storage] = self._writes.get(x.storage, 0) + 1
                self._writer[x.storage] = number
        self._new_number.append(number)
        self._operators.append(record.model_copy(update=changes))

    def _recorded_format(self, record: OperatorRecord) -> str | None:
        """Of its results, else of what it reads; None for whole numbers."""
        made = [x.dtype for x in record.outputs if x.dtype in FLOATING]
        return next(iter(made or [x.dtype for x in record.inputs if x.dtype in FLOATING]), None)

    def _format(self, record: OperatorRecord, recorded: str) -> str | None:
        """In which the record computes now; None for a view, which is of what it is a view of."""
        if record.name.endswith(_GRADIENT) and record.kind == "metadata":
            return recorded
        if record.kind == "metadata":
            return None
        if record.kind == "optimizer" or self._writes_elsewhere(record):
            return recorded
        if record.name in self.formats:
            return self.formats[record.name]
        if self._is_own_loss(record):
            if record.phase != "backward":
                self._logits[record.name] = next(self._now(x).dtype for x in record.inputs if x.dtype == recorded)
                return recorded
            return self._logits.get(record.name, recorded)
        if record.phase == "backward" and record.name in self._chosen:
            return self._chosen[record.name]
        follows = _FOLLOWS_IN_LOSS if record.phase == "loss" else _FOLLOWS
        found = {self._now(x).dtype for x in record.inputs if x.dtype == recorded and self._is_made(x)}
        can_follow = record.kind in follows and record.within != _BATCH_NORM
        wanted = found.pop() if can_follow and len(found) == 1 else recorded
        if record.phase != "backward":
            self._chosen[record.name] = wanted
        return wanted

    def _is_made(self, x: TensorRecord) -> bool:
        """Whether an operator of the step gives it: parameters and inputs are nobody's neighbours."""
        return x.storage < 0 or self.given.storages[x.storage].made_by >= 0

    def _writes_elsewhere(self, record: OperatorRecord) -> bool:
        """Whether it changes memory that was there before: gradients' buckets, running sums."""
        outputs = [x for x in record.outputs if x.storage >= 0]
        place = len(self._new_number)
        return bool(outputs) and all(self.given.storages[x.storage].made_by != place for x in outputs)

    def _converts(self, record: OperatorRecord) -> bool:
        """Whether it reads any format on its own."""
        return record.op == "aten.copy_" or self._is_own_loss(record)

    def _is_own_loss(self, record: OperatorRecord) -> bool:
        """Losses of ours on GPUs, not torch's: of logits in any format, to which gradients return in theirs."""
        return record.kind == "loss" and not record.op.startswith("aten.")

    def _now(self, x: TensorRecord) -> TensorRecord:
        """What is read in place of ``x``, in the format that it has now."""
        storage = self._stands_for.get(x.storage, x.storage)
        if storage < 0 or x.dtype != self.given.storages[x.storage].dtype:
            return x
        dtype = self._storages[storage].dtype
        return x if (storage, dtype) == (x.storage, x.dtype) else self._like(x, storage, dtype)

    def _like(self, x: TensorRecord, storage: int, dtype: str) -> TensorRecord:
        return TensorRecord(storage=storage, shape=x.shape, dtype=dtype)

    def _output(
        self,
        x: TensorRecord,
        wanted: str | None,
        recorded: str | None,
        number: int,
        record: OperatorRecord,
        moved: Mapping[int, int],
    ) -> TensorRecord:
        if x.storage < 0:
            return x if wanted is None or x.dtype != recorded else self._like(x, -1, wanted)
        if x.storage in moved and record.kind == "metadata":  # a gradient that arrives in its parameter's format
            self._stands_for[x.storage] = moved[x.storage]
            return self._now(x)
        kept = self._storages[x.storage]
        is_new = kept.record.made_by == len(self._new_number)
        if is_new and wanted is not None and kept.record.dtype == recorded:
            kept.dtype = wanted
        return self._now(x)

    def _other_sizes(self, record: OperatorRecord, recorded: str, wanted: str) -> dict[str, Any]:
        """Sizes in bytes, the wire, and memory inside."""
        old, new = item_bytes(recorded), item_bytes(wanted)
        in_bytes = {"picked_bytes"}
        attrs = record.attrs
        if attrs.get("wire") == recorded:
            in_bytes.add("row_bytes")
            attrs = attrs | {"wire": wanted}
        sizes = {key: _times(dim, new, old) if key in in_bytes else dim for key, dim in record.sizes.items()}
        workspace = tuple(
            x.model_copy(update={"dtype": wanted}) if x.dtype == recorded else x for x in record.workspace
        )
        return {"sizes": sizes, "attrs": attrs, "workspace": workspace}

    # -- casts ---------------------------------------------------------------------------------------------------------

    def _cast(self, x: TensorRecord, dtype: str, reader: OperatorRecord) -> TensorRecord:
        """``x`` in ``dtype``, from a record that is there already or is added now."""
        kept = self._storages[x.storage]
        kept.is_read_as_cast = True
        key = self._cast_key(x, dtype, reader)
        if key not in self._casts:
            self._casts[key] = self._add_cast(x, dtype, reader)
        return self._like(x, self._casts[key], dtype)

    def _cast_key(self, x: TensorRecord, dtype: str, reader: OperatorRecord) -> tuple[int, str, str, int]:
        is_parameter = self._storages[x.storage].record.category == "parameter"
        return x.storage, dtype, "" if is_parameter else reader.name, self._writes.get(x.storage, 0)

    def _cast_seen(self, record: OperatorRecord, x: TensorRecord) -> TensorRecord:
        """``x``; where a view in backward is of what its operator has read, that is the cast."""
        if record.kind != "metadata" or record.phase != "backward" or x.storage < 0:
            return x
        dtype = self.formats.get(record.name, self._chosen.get(record.name))
        if dtype is None or dtype == x.dtype or x.dtype not in FLOATING:
            return x
        cast = self._casts.get(self._cast_key(x, dtype, record))
        return x if cast is None else self._like(x, cast, dtype)

    def _add_cast(self, x: TensorRecord, dtype: str, reader: OperatorRecord) -> int:
        number, storage = len(self._operators), len(self._storages)
        source = self._storages[x.storage]
        is_gradient = reader.kind == "metadata" and source.record.category == "gradient"
        made = Storage(
            values=source.record.values,
            dtype=dtype,
            category="gradient" if is_gradient else "activation",
            made_by=number,
            freed_by=None if is_gradient else number,
            name=source.record.name if is_gradient else "",
        )
        if is_gradient:
            gone = {"category": "activation", "freed_by": len(self._new_number), "name": ""}
            source.record = source.record.model_copy(update=gone)
            source.is_read_as_cast = True
        is_of_parameter = source.record.category == "parameter"
        self._storages.append(_Kept(dtype, made, number, is_of_parameter=is_of_parameter))
        writer = self._writer.get(x.storage)
        self._writer[storage] = number
        source.last_use = number
        self._operators.append(
            OperatorRecord(
                name=reader.name,
                op=CAST,
                kind="copy",
                phase=reader.phase,
                inputs=(x,),
                outputs=(self._like(x, storage, dtype),),
                depends_on=() if writer is None else (writer,),
            )
        )
        return storage

    # -- memory --------------------------------------------------------------------------------------------------------

    def _storage(self, number: int, kept: _Kept) -> Storage:
        """With the numbers that records have now, and gone when nobody reads it any more."""
        record = kept.record
        if number >= len(self.given.storages):
            if record.freed_by is None:
                return record
            is_saved = self._operators[record.made_by].phase != "backward" == self._operators[kept.last_use].phase
            last = kept.last_use
            if kept.is_of_parameter:  # they are kept for whoever asks next
                last = max(i for i, r in enumerate(self._operators) if r.phase != "optimizer")
            return record.model_copy(update={"freed_by": last, "is_saved": is_saved})
        changes: dict[str, Any] = {"dtype": kept.dtype}
        if record.made_by >= 0:
            changes["made_by"] = self._new_number[record.made_by]
        if record.freed_by is not None and record.freed_by >= 0:
            later = self._new_number[record.freed_by]
            has_shrunk = kept.is_read_as_cast and record.category == "activation"
            changes["freed_by"] = max(kept.last_use, changes.get("made_by", -1)) if has_shrunk else later
            changes["is_saved"] = record.is_saved and not (
                has_shrunk and self._operators[changes["freed_by"]].phase != "backward"
            )
        return record.model_copy(update=changes)


def _times(dim: Dim, new: int, old: int) -> Dim:
    """``dim`` bytes in another format."""
    if isinstance(dim, int):
        return dim * new // old
    factor, symbol, offset = parsed(dim)
    return formula(factor * new // old, symbol, offset * new // old)
