"""The real Prometheus: it takes our rules, fires our alerts, and scrapes a running stack."""

import contextlib
import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.addresses import free_address
from tests.system.stack import Stack, serving

pytestmark = pytest.mark.prometheus

ROOT = Path(__file__).parents[2]
RULES = ROOT / "k8s" / "components" / "monitoring" / "rules.yaml"
LIMIT_S = 30


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    """The rules as Prometheus reads them, without what Kubernetes puts around them."""
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(RULES.read_text(encoding="utf-8"))["spec"]))
    return path


def promtool(*arguments: str) -> str:
    """Returns the output of promtool, which must find no fault."""
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_finds_nothing_wrong_with_the_rules(rules: Path) -> None:
    n_rules = len(yaml.safe_load(rules.read_text())["groups"][0]["rules"])
    assert f"SUCCESS: {n_rules} rules found" in promtool("check", "rules", str(rules))


CALLS = "gen_ai_server_request_duration_seconds_count"
COMPUTED = "orcinus_stage_compute_seconds_sum"
CASES: dict[str, tuple[dict[str, str], str]] = {
    "OrcinusPipelineLost": ({'orcinus_pipeline_losses_total{namespace="n"}': "0+1x30"}, "20m"),
    "OrcinusPipelinesMissing": (
        {
            'orcinus_pipelines{namespace="n", pod="leader"}': "1x60",
            'orcinus_pipelines{namespace="n", pod="standby"}': "0x60",
            'orcinus_pipelines_wanted{namespace="n", pod="leader"}': "2x60",
            'orcinus_pipelines_wanted{namespace="n", pod="standby"}': "0x60",
        },
        "15m",
    ),
    "OrcinusErrors": (
        {
            f'{CALLS}{{namespace="n", error_type=""}}': "0+90x30",
            f'{CALLS}{{namespace="n", error_type="Unavailable"}}': "0+10x30",
        },
        "20m",
    ),
    "OrcinusRequestsBroken": (
        {
            'orcinus_requests_broken_total{namespace="n"}': "0+5x30",
            f'{CALLS}{{namespace="n", error_type="RequestFailed"}}': "0+5x30",
            f'{CALLS}{{namespace="n", error_type=""}}': "0+3x30",
        },
        "20m",
    ),
    "OrcinusQueueLong": ({'orcinus_requests_waiting{namespace="n"}': "300x30"}, "15m"),
    "OrcinusKVCacheFull": (
        {
            'orcinus_kv_cache_usage_ratio{namespace="n"}': "0.97x60",
            'orcinus_requests_waiting{namespace="n"}': "3x60",
        },
        "30m",
    ),
    "OrcinusStageIsTheLimit": (
        {
            f'{COMPUTED}{{namespace="n", stage="0"}}': "0+24x60",
            f'{COMPUTED}{{namespace="n", stage="1"}}': "0+54x60",
            'orcinus_pipelines{namespace="n"}': "1x60",
            'orcinus_requests_waiting{namespace="n"}': "3x60",
        },
        "30m",
    ),
    "OrcinusStagesIdle": (
        {
            f'{COMPUTED}{{namespace="n", stage="0"}}': "0+24x60",
            f'{COMPUTED}{{namespace="n", stage="1"}}': "0+18x60",
            'orcinus_pipelines{namespace="n"}': "1x60",
            'orcinus_requests_waiting{namespace="n"}': "3x60",
        },
        "30m",
    ),
}
FURTHER_LABELS = {"OrcinusStageIsTheLimit": {"stage": "1"}}


@pytest.mark.parametrize("alert", CASES)
def test_an_alert_fires_when_it_should_and_not_before(
    alert: str, rules: Path, tmp_path: Path
) -> None:
    series, at = CASES[alert]
    check_alert(alert, series, at=at, fires=True, rules=rules, tmp_path=tmp_path)


@pytest.mark.parametrize(
    ("alert", "busy_s", "fires"),
    [
        ("OrcinusStageIsTheLimit", 48, False),
        ("OrcinusStageIsTheLimit", 108, True),
        ("OrcinusStagesIdle", 48, True),
        ("OrcinusStagesIdle", 72, False),
    ],
)
def test_an_alert_about_stages_looks_at_the_mean_of_two_pipelines(
    alert: str, busy_s: int, fires: bool, rules: Path, tmp_path: Path
) -> None:
    """`busy_s` is the number of seconds that both second stages together compute in a minute."""
    series = {
        f'{COMPUTED}{{namespace="n", pod="leader", stage="0"}}': "0+24x60",
        f'{COMPUTED}{{namespace="n", pod="leader", stage="1"}}': f"0+{busy_s}x60",
        'orcinus_pipelines{namespace="n", pod="leader"}': "2x60",
        'orcinus_pipelines{namespace="n", pod="standby"}': "0x60",
        'orcinus_requests_waiting{namespace="n", pod="leader"}': "3x60",
    }
    check_alert(alert, series, at="30m", fires=fires, rules=rules, tmp_path=tmp_path)


def check_alert(
    alert: str, series: dict[str, str], *, at: str, fires: bool, rules: Path, tmp_path: Path
) -> None:
    """Checks whether an alert fires at a time, and that it does not fire at the beginning."""
    every = yaml.safe_load(rules.read_text())["groups"][0]["rules"]
    (rule,) = (rule for rule in every if rule["alert"] == alert)
    labels = FURTHER_LABELS.get(alert, {})
    summary = rule["annotations"]["summary"]
    for name, value in labels.items():
        summary = summary.replace(f"{{{{ $labels.{name} }}}}", value)
    expected = {
        "exp_labels": {"namespace": "n", **rule["labels"], **labels},
        "exp_annotations": {"summary": summary},
    }
    test = {
        "rule_files": [str(rules)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": name, "values": values} for name, values in series.items()
                ],
                "alert_rule_test": [
                    {"eval_time": "0m", "alertname": alert, "exp_alerts": []},
                    {
                        "eval_time": at,
                        "alertname": alert,
                        "exp_alerts": [expected] if fires else [],
                    },
                ],
            }
        ],
    }
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump(test))
    promtool("test", "rules", str(path))


SCHEDULERS = {
    'orcinus_leader{namespace="n", pod="s0"}': "1x40",
    'orcinus_leader{namespace="n", pod="s1"}': "0x40",
    'orcinus_serving{namespace="n", pod="s1"}': "0x40",
}
WELL, WELL_TO_100S = "1x40", "1x20 0x20"
BESIDE = 'namespace="n", app_kubernetes_io_instance="orcinus-b", pod="s2"'
"""A scheduler of another deployment in the namespace."""


@pytest.mark.parametrize(
    ("series", "fires"),
    [
        ({'orcinus_serving{namespace="n", pod="s0"}': WELL}, False),
        ({'orcinus_serving{namespace="n", pod="s0"}': WELL_TO_100S}, True),
        (
            {
                'orcinus_serving{namespace="n", pod="s0"}': WELL,
                'orcinus_serving{namespace="n", pod="f0"}': WELL_TO_100S,
                'orcinus_frontend_answers_in_flight{namespace="n", pod="f0"}': "3x40",
            },
            True,
        ),
        (
            {
                'orcinus_serving{namespace="n", pod="s0"}': WELL,
                'orcinus_serving{namespace="n", pod="f0"}': WELL,
                'orcinus_serving{namespace="n", pod="f1"}': WELL_TO_100S,
                'orcinus_frontend_answers_in_flight{namespace="n", pod="f0"}': "3x40",
                'orcinus_frontend_answers_in_flight{namespace="n", pod="f1"}': "0x40",
            },
            False,
        ),
        (
            {
                'orcinus_serving{namespace="n", pod="s0"}': "1x20 stale",
                'orcinus_leader{namespace="n", pod="s0"}': "1x20 stale",
            },
            True,
        ),
        (
            {
                'orcinus_serving{namespace="n", pod="s0"}': WELL_TO_100S,
                f"orcinus_serving{{{BESIDE}}}": WELL,
                f"orcinus_leader{{{BESIDE}}}": WELL,
            },
            True,
        ),
    ],
    ids=[
        "well",
        "the leader",
        "a frontend",
        "a frontend that nobody asks",
        "the leader is gone",
        "another deployment serves",
    ],
)
def test_the_alert_that_nothing_is_served_fires_within_a_minute(
    series: dict[str, str], fires: bool, rules: Path, tmp_path: Path
) -> None:
    group = yaml.safe_load(rules.read_text())["groups"][0]
    (rule,) = (rule for rule in group["rules"] if rule["alert"] == "OrcinusNotServing")
    alert = {
        "exp_labels": {"namespace": "n", **rule["labels"]},
        "exp_annotations": rule["annotations"],
    }
    test = {
        "rule_files": [str(rules)],
        "evaluation_interval": group["interval"],
        "tests": [
            {
                "interval": "5s",
                "input_series": [
                    {"series": name, "values": values}
                    for name, values in (SCHEDULERS | series).items()
                ],
                "alert_rule_test": [
                    {"eval_time": "95s", "alertname": rule["alert"], "exp_alerts": []},
                    {
                        "eval_time": "140s",
                        "alertname": rule["alert"],
                        "exp_alerts": [alert] if fires else [],
                    },
                ],
            }
        ],
    }
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump(test))
    promtool("test", "rules", str(path))


def expression(title: str, **variables: str) -> str:
    """Returns the first query of a panel of the dashboard, with the values of variables."""
    dashboard = json.loads((RULES.parent / "dashboard.json").read_text(encoding="utf-8"))
    (panel,) = (panel for panel in dashboard["panels"] if panel["title"] == title)
    text: str = panel["targets"][0]["expr"]
    for name, value in variables.items():
        text = text.replace(f"${name}", value)
    return text


LABEL = "app_kubernetes_io_instance"
TWO_DEPLOYMENTS = {
    f'up{{namespace="n", pod="orcinus-worker-1", {LABEL}="orcinus"}}': "1",
    f'up{{namespace="n", pod="orcinus-worker-b-1", {LABEL}="orcinus-b"}}': "1",
    'kube_pod_status_ready{namespace="n", pod="orcinus-worker-1", condition="true"}': "1",
    'kube_pod_status_ready{namespace="n", pod="orcinus-worker-b-1", condition="true"}': "0",
    'kube_pod_status_ready{namespace="n", pod="pending", condition="true"}': "0",
    'kube_lease_renew_time{namespace="n", lease="orcinus-scheduler"}': "-10",
    'kube_lease_renew_time{namespace="n", lease="orcinus-scheduler-b"}': "-20",
}


@pytest.mark.parametrize(
    ("instance", "pod", "is_ready", "age_s"),
    [("orcinus", "orcinus-worker-1", 1, 10), ("orcinus-b", "orcinus-worker-b-1", 0, 20)],
)
def test_the_dashboard_shows_what_kubernetes_knows_of_one_deployment(
    instance: str, pod: str, is_ready: int, age_s: int, tmp_path: Path
) -> None:
    ready = expression("Pods ready", namespace="n", instance=instance)
    age = expression("Age of the scheduler's lease", namespace="n", instance=instance)
    pods = [{"labels": f'{{pod="{pod}"}}', "value": is_ready}]
    test = {
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": name, "values": value} for name, value in TWO_DEPLOYMENTS.items()
                ],
                "promql_expr_test": [
                    {
                        "expr": ready,
                        "eval_time": "0m",
                        "exp_samples": [*pods, {"labels": '{pod="pending"}', "value": 0}],
                    },
                    {
                        "expr": f"sum({age})",
                        "eval_time": "0m",
                        "exp_samples": [{"labels": "{}", "value": age_s}],
                    },
                ],
            }
        ],
    }
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump(test))
    promtool("test", "rules", str(path))


@contextlib.contextmanager
def prometheus(stack: Stack, directory: Path) -> Iterator[httpx.Client]:
    """A Prometheus that scrapes all services of a stack every second."""
    scrapes = [
        {
            "targets": [url.removeprefix("http://").removesuffix("/metrics")],
            "labels": {"service": name, "namespace": "n"},
        }
        for name, url in stack.metrics_urls.items()
    ]
    configuration = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [{"job_name": "orcinus", "static_configs": scrapes}],
    }
    (directory / "prometheus.yaml").write_text(yaml.safe_dump(configuration))
    address = free_address()
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={directory / 'prometheus.yaml'}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address={address}",
            "--enable-feature=exemplar-storage",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with httpx.Client(base_url=f"http://{address}") as client:
            yield client
    finally:
        process.terminate()
        process.wait(LIMIT_S)


def query(client: httpx.Client, expression: str) -> list[dict[str, Any]]:
    """Returns the result of an instant query, once it finds something."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            response = client.get("/api/v1/query", params={"query": expression})
            if response.status_code == 200 and (found := response.json()["data"]["result"]):
                result: list[dict[str, Any]] = found
                return result
        time.sleep(0.2)
    raise AssertionError(f"nothing for {expression}")


def panels() -> list[str]:
    """Returns the dashboard's queries of our own metrics."""
    dashboard = json.loads((RULES.parent / "dashboard.json").read_text(encoding="utf-8"))
    expressions = (target["expr"] for it in dashboard["panels"] for target in it["targets"])
    own = (it for it in expressions if "kube_" not in it)
    values = {"$namespace": "n", "$instance": "", "$__rate_interval": "1m"}
    return [re.sub(r"\$\w+", lambda found: values[found[0]], it) for it in own]


def test_prometheus_scrapes_a_stack_and_the_dashboard_has_data(tmp_path: Path) -> None:
    with (
        serving(ROOT / "models" / "demo", stages=2, metrics=True) as stack,
        prometheus(stack, tmp_path) as client,
    ):
        assert len(query(client, "up == 1")) >= 1
        usage = stack.post("/v1/completions", {"prompt": "If the file", "max_tokens": 7}).json()
        expected = usage["usage"]["completion_tokens"]
        [found] = query(client, f"sum(orcinus_generation_tokens_total) >= {expected}")
        assert float(found["value"][1]) == expected
        assert len(query(client, "count(up == 1) == 4")) == 1
        for expression in panels():
            query(client, expression)
        kinds = client.get("/api/v1/targets/metadata").json()["data"]
        by_name = {item["metric"]: item["type"] for item in kinds}
        assert by_name["orcinus_requests_waiting"] == "gauge"
        assert by_name["orcinus_iteration_seconds"] == "histogram"
