"""The first page: is it learning, how fast, who waits for whom, how stale, what was lost."""

from __future__ import annotations

from typing import Any

from common.monitoring import figures
from common.monitoring import thresholds as limits
from common.monitoring.panels import SHOWN, Dashboard, Panel, Query, Row, stat

RETURN = "rookery_learner_episode_return_mean"


ACTORS = SHOWN.series("rookery_learner_peers_connected", 'role="actor"')


def build() -> dict[str, Any]:
    """The JSON model."""
    return Dashboard(
        uid="rookery-overview",
        title="Rookery / Overview",
        description="One run at a glance: learning, speed, waiting, staleness, losses.",
        of="rookery_build_info",
        rows=[_five_questions(), _learning_and_speed(), _flow(), _processes()],
    ).as_json()


def _five_questions() -> Row:
    learns = f"max by (namespace) ({SHOWN.series(RETURN)})"
    frames = SHOWN.total("rookery_learner_env_frames_trained_total")
    waits = figures.bottleneck(figures.learner_waits(SHOWN), figures.actors_wait(SHOWN), figures.on_the_wire(SHOWN))
    return Row(
        "Is it well?",
        [
            stat(
                "Is it learning?",
                "Mean raw return of the last 100 training episodes. It should rise; losses need not fall.",
                Query(learns, "mean100"),
                unit="short",
            ),
            stat("How fast?", "Emulator frames trained on per second.", Query(frames, "frames/s"), unit="short"),
            stat(
                "Who waits for whom?",
                "learner-bound: actors wait for credit. actor-bound: the learner waits for experience. "
                "network-bound, pace-bound: both wait, for the network or for one another. balanced: nobody waits.",
                Query(waits, "bottleneck"),
                unit="none",
                words=figures.BOTTLENECKS,
            ),
            stat(
                "How stale?",
                "Policy lag that 95 % of the experience stays below when it is trained on, as a part of the "
                "largest that is accepted (learner.max_policy_lag).",
                Query(figures.policy_lag_share(SHOWN), "of the limit"),
                unit="percentunit",
                limit=limits.LAG,
            ),
            stat(
                "What was lost?",
                "Part of all env steps of the whole run dropped, for whatever reason, resumes included.",
                Query(figures.lost_share(SHOWN), "lost"),
                unit="percentunit",
                limit=limits.DROPPED,
            ),
            stat(
                "Who is there?",
                "Actors that the learner has welcomed and that still speak.",
                Query(f"sum by (namespace) ({ACTORS})", "actors"),
                unit="short",
            ),
        ],
    )


def _learning_and_speed() -> Row:
    return Row(
        "Learning and speed",
        [
            Panel(
                title="Return",
                description="Mean raw return: of the last 100 training episodes, and of the last evaluation, acting greedily or "
                "as in training.",
                queries=[
                    Query(SHOWN.series(RETURN), "training, mean100"),
                    Query(SHOWN.series("rookery_learner_evaluation_return_mean"), "evaluation, {{mode}}"),
                ],
                unit="short",
                width=12,
            ),
            Panel(
                title="Frames per second",
                description="Emulator frames: trained on by the learner, and played by all actors. Played and not trained on is "
                "waiting in the queue, or dropped.",
                queries=[
                    Query(SHOWN.total("rookery_learner_env_frames_trained_total"), "trained on"),
                    Query(SHOWN.total("rookery_actor_env_frames_total"), "played"),
                ],
                unit="short",
                width=12,
            ),
        ],
    )


def _flow() -> Row:
    return Row(
        "Waiting, staleness, losses",
        [
            Panel(
                title="Waiting",
                description="Part of its time that each side waits for the other. Who waits less than the line is busy.",
                queries=[
                    Query(figures.learner_waits(SHOWN), "learner, for experience"),
                    Query(figures.actors_wait(SHOWN), "actors, for credit"),
                ],
                unit="percentunit",
                limit=limits.WAITING,
                most=1,
            ),
            Panel(
                title="Policy lag",
                description="Versions between the policy that acted and the newest, when experience is trained on; and the "
                "largest that is accepted.",
                queries=[
                    Query(figures.policy_lag(SHOWN, 0.5), "median"),
                    Query(figures.policy_lag(SHOWN, 0.95), "95 %"),
                    Query(f"max by (namespace) ({SHOWN.series('rookery_learner_policy_lag_limit_versions')})", "limit"),
                ],
                unit="short",
            ),
            Panel(
                title="Dropped, by reason",
                description="Env steps per second that will never be trained on. A learner that resumes takes over the counts of "
                "its checkpoint, which shows as a peak.",
                queries=[Query(SHOWN.total("rookery_learner_env_steps_dropped_total", by="namespace, reason"), "{{reason}}")],
                unit="short",
                stacked=True,
            ),
        ],
    )


def _processes() -> Row:
    return Row(
        "Processes",
        [
            Panel(
                title="How many actors?",
                description="Connected; and how many like these would keep the learner busy, from what each side does per second "
                "of work.",
                queries=[
                    Query(f"sum by (namespace) ({ACTORS})", "connected"),
                    Query(figures.actors_wanted(SHOWN), "wanted"),
                ],
                unit="short",
                width=6,
            ),
            Panel(
                title="Targets up",
                description="Services that answer Prometheus.",
                queries=[Query(f"sum by (namespace, job) ({SHOWN.series('up')})", "{{job}}")],
                unit="short",
                width=6,
            ),
            Panel(
                title="Resident memory",
                description="What each process holds in memory.",
                queries=[Query(SHOWN.series("process_resident_memory_bytes"), "{{job}} {{instance}}")],
                unit="bytes",
                width=6,
            ),
            Panel(
                title="CPU",
                description="Cores that each process uses.",
                queries=[Query(SHOWN.rate("process_cpu_seconds_total"), "{{job}} {{instance}}")],
                unit="short",
                width=6,
            ),
        ],
    )
