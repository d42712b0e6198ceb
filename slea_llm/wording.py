"""Slot values into words: the piece of wording that environments and simulated users share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence


def fragments(
    forms: Mapping[str, Sequence[str]], values: Mapping[str, str], choose: Callable[[Sequence[str]], str]
) -> list[str]:
    """One fragment for each group of values, in the order of `values`.

    A key of `forms` names the slots that its forms speak of, joined by `+`; keys of more slots win. `choose` picks one
    of the forms, in which `{slot}` stands for the value. Raises KeyError for a value that no form speaks of.
    """
    order = list(values)
    left = set(order)
    groups: list[tuple[str, ...]] = []
    for key in sorted(forms, key=lambda key: -key.count("+")):
        slots = tuple(key.split("+"))
        if left.issuperset(slots):
            left.difference_update(slots)
            groups.append(slots)
    if left:
        raise KeyError(f"no wording for {', '.join(sorted(left))}; there are forms for {', '.join(sorted(forms))}")
    groups.sort(key=lambda slots: min(order.index(slot) for slot in slots))
    return [choose(forms["+".join(slots)]).format(**{slot: values[slot] for slot in slots}) for slots in groups]
