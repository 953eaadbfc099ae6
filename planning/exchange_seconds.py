"""Seconds of exchanges that are none of halo rows, and what sums of gradients take from computing beside them."""

from __future__ import annotations

from nugnn.comm.compression.wire import Wire
from nugnn.planning.links import Links
from nugnn.planning.operator_costs import number
from nugnn.planning.operator_times import OperatorTimes
from nugnn.planning.step_program import Exchange


def collective_seconds(exchange: Exchange, links: Links, gradient_wire: Wire) -> float:
    """Of an exchange that is none of halo rows, from when all ranks have come.

    Gradients that do not travel as they are go to their owners in few bits, and their sums back; all of them count as
    compressed, and what coding takes does not.

    Args:
        exchange: With numbers.
        links: Between the ranks.
        gradient_wire: Of gradients.
    """
    values = number(exchange.sent)
    if exchange.is_gradient and gradient_wire.name != "fp32":
        return links.coded_sum_seconds(gradient_wire.num_bytes(values))
    num_bytes = number(exchange.row_bytes) * values
    return links.collective_seconds(exchange.kind, num_bytes, is_aside=exchange.is_aside)


def collective_passing_seconds(exchange: Exchange, links: Links, gradient_wire: Wire) -> float:
    """Of what `collective_seconds` says, the part in which bytes are on their way; known of plain sums alone."""
    if exchange.kind != "all_reduce" or (exchange.is_gradient and gradient_wire.name != "fp32"):
        return 0.0
    return links.passing_seconds(number(exchange.row_bytes) * number(exchange.sent), is_aside=exchange.is_aside)


def taken_seconds(exchange: Exchange, links: Links, rank: int, times: OperatorTimes, gradient_wire: Wire) -> float:
    """What a sum of gradients that travels beside backward takes from computing on the same cores, at most.

    Args:
        exchange: With numbers; any other than such a sum takes nothing, and nor do gradients in few bits, of which
            nobody has measured it.
        links: Between the ranks.
        rank: Which of them computes.
        times: Of its operators. Those of a device with a host that launches them do not run on the host's cores.
        gradient_wire: Of gradients.
    """
    if not exchange.is_aside or gradient_wire.name != "fp32" or times.launch_seconds > 0:
        return 0.0
    return links.core_seconds(rank, number(exchange.row_bytes) * number(exchange.sent)) / times.multiprocessors
