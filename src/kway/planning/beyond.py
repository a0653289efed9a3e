"""What of a price lies beyond all that was timed: a line for the user, since nothing else shows it."""

from kway.cost.compute import timed_shares
from kway.planning.candidates import Candidate
from kway.workload import Workload


def beyond(workload: Workload, candidate: Candidate, samples: int) -> list[str]:
    """Return lines on a candidate each of whose devices computes ``samples``: none where both numbers were timed.

    Shares of a batch that is the same for all lie between those that a profile times. With a batch for each device
    (weak scaling) they do not: a profile is of one batch, and times smaller shares the more devices there are.
    """
    kind, several = candidate.step_kind, candidate.devices > 1
    found = []
    most = max((each["devices"] for each in workload.timed(kind, several=True)), default=None)
    if several and most is not None and candidate.devices > most:
        found.append(
            f"extrapolated: what one of several devices does was timed for {most} at most, not for {candidate.devices}"
        )
    shares = timed_shares(workload, kind, candidate.threads, several)
    if shares and not shares[0] <= samples <= shares[-1]:
        span = f"{shares[0]:,}" if len(shares) == 1 else f"{shares[0]:,} to {shares[-1]:,}"
        found.append(
            f"extrapolated: shares of {span} samples were timed, and this one has {samples:,} (a straight line)"
        )
    return found
