"""The database-timeout dialogue: an agent that fails by coarse steps, and steps that would have helped."""

from __future__ import annotations

from slea_llm.types import Message, Trajectory, Turn

LOG = "My app cannot reach its database. The log says: Connection timeout."
GENERIC_CHECK = "Please check whether the network connection is normal and whether the database service is running."
ALL_FINE = "I have checked all of that: the network is fine and the database service is running."
RESTART = "Please restart the database service and try again."
ASKS_FOR_DETAIL = "What is the connection timeout set to in your configuration, and which database version do you run?"
NO_HELP = "It still times out. This did not help."


def dialogue(*replies: str, feedback: tuple[str, ...] = (ALL_FINE,), success: bool = False) -> Trajectory:
    """The user's problem, then replies of the agent, each but the first after a piece of feedback."""
    said = (LOG, *feedback)
    return Trajectory(
        id="database-timeout",
        task={},
        environment="tech_support",
        seed=0,
        policy_version=0,
        turns=tuple(
            Turn(index=index, context=(Message(role="user", content=said[index]),), text=reply)
            for index, reply in enumerate(replies)
        ),
        traces=(),
        outcome=1.0 if success else -1.0,
        termination="success" if success else "failure",
    )
