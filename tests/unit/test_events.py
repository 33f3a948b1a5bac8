"""Events and the policy on them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantforge.errors import RefusedError, UsageError
from quantforge.events import KINDS, Event, Policy

EVENTS = st.lists(
    st.builds(Event, st.sampled_from(sorted(KINDS)), st.text(), st.text()), max_size=8
)
LIMITS = st.dictionaries(st.sampled_from(sorted(KINDS)), st.integers(0, 4))


@given(EVENTS, st.booleans(), LIMITS)
def test_the_event_policy_counts_by_kind(events, strict, allow):
    counts = {kind: sum(event.kind == kind for event in events) for kind in KINDS}
    excess = {
        kind for kind, count in counts.items() if count > allow.get(kind, 0 if strict else count)
    }
    policy = Policy(strict, allow)
    if not excess:
        policy.check(events)
        return
    with pytest.raises(RefusedError) as refused:
        policy.check(iter(events))
    kind = min(excess)
    assert f"--allow {kind}={counts[kind]}" in refused.value.hint
    # What the hint says is enough for this kind.
    Policy(strict, {**dict.fromkeys(KINDS, 99), kind: counts[kind]}).check(events)


def test_a_misspelt_event_kind_gets_a_suggestion():
    with pytest.raises(UsageError) as caught:
        Policy(allow={"damping-risen": 1})
    assert "'damping-raised'" in caught.value.hint
    with pytest.raises(ValueError, match="unknown event"):
        Event("new", "", "")


def test_events_round_trip_through_json():
    event = Event("substitution", "a.weight", "int4 -> int8")
    assert Event(**event.to_json()) == event
