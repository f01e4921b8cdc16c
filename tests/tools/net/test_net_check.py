"""`simpletuner net check`: real ranks on one machine, and on machines of which two have a slow link."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time

import pytest
import ranks
from machines import PORT, slow_down, tear_down, wire_to_switch

from simpletuner.app import main
from simpletuner.tools.net.measure import bus_rate, growing, rounds_of, thinned, tournament
from simpletuner.tools.net.results import AllReduce, NetworkMachine, NetworkResult, PairResult

HOSTS = ("node0", "node1", "node2", "node3")


def json_in(text: str) -> dict:
    return json.loads(text[text.index("{\n") : text.rindex("\n}") + 2])


def result_of(between: dict[tuple[int, int], tuple[float, float]], backend: str = "nccl") -> NetworkResult:
    """A result of machines with two ranks each, from round trip in s and bytes per second of pairs of machines."""
    machines = [NetworkMachine(n, host, (2 * n, 2 * n + 1), "eth0") for n, host in enumerate(HOSTS)]
    pairs = [PairResult(2 * first, 2 * second, *values, 1 << 20) for (first, second), values in between.items()]
    return NetworkResult(backend, 30, machines, pairs, [], [AllReduce(1 << 20, 1e-3, 1e9)], len(pairs))


def pairs_of(count: int) -> list[tuple[int, int]]:
    return [(first, second) for first in range(count) for second in range(first + 1, count)]


def test_everyone_meets_everyone_once_and_one_at_a_time():
    for count in range(2, 20):
        rounds = tournament(range(count))
        assert sorted(pair for pairs in rounds for pair in pairs) == pairs_of(count)
        assert all(len({rank for pair in pairs for rank in pair}) == 2 * len(pairs) for pairs in rounds)
        assert len(rounds) == count - 1 + count % 2
    rounds = rounds_of([(0, 1, 2), (3, 4, 5), (6, 7, 8)])
    assert {frozenset(pairs) for pairs in rounds[:3]} == {frozenset({pair}) for pair in ((0, 3), (0, 6), (3, 6))}
    assert {pair for pairs in rounds[3:] for pair in pairs} == {
        (a + 3 * m, b + 3 * m) for m in range(3) for a, b in pairs_of(3)
    }
    assert len(rounds) == 6, "machines measure their own pairs at the same time"
    assert thinned(rounds, 100) == rounds
    few = thinned(tournament(range(100)), 4)
    assert len(few) == 20 and all(len(pairs) == 50 for pairs in few)


def test_a_link_of_any_speed_is_measured_within_the_time():
    def link(bytes_per_second: float):
        def order(size: int, repeats: int) -> list[float]:
            time.sleep(repeats * size / bytes_per_second)
            return [size / bytes_per_second] * repeats

        return order

    for rate in (2e5, 3e6, 1e9, 1e13):
        began = time.monotonic()
        sizes = growing(link(rate), 1.0, 1 << 26)
        assert time.monotonic() - began < 1.5 or rate == 2e5, "the least is three messages of 64 KiB"
        assert [size / took for size, took in sizes] == pytest.approx([rate] * len(sizes))
    assert growing(link(1e13), 1.0, 1 << 26)[-1][0] == 1 << 26
    assert bus_rate(1000, 2.0, 4) == 750


def test_the_pairs_of_a_slow_machine_and_a_slow_pair_are_named():
    fast, slow, late = (20e-6, 10e9), (20e-6, 4e9), (300e-6, 10e9)
    assert result_of(dict.fromkeys(pairs_of(4), fast)).slow == ()
    for count in (3, 4):
        bad = {pair: slow if 2 in pair else fast for pair in pairs_of(count)}
        found = result_of(bad)
        assert [each.pair.ranks for each in found.slow] == [(2 * a, 2 * b) for a, b in bad if 2 in (a, b)]
        assert list(found.slow_sentences()) == ["machine 2 (node2) with all others: 4.0 GB/s, usual are 10.0 GB/s"]
    found = result_of({**dict.fromkeys(pairs_of(4), fast), (1, 3): late})
    sentence = "machine 1 (node1) with machine 3 (node3): a round trip takes 0.3 ms, usual are 0.02 ms"
    assert found.as_json()["slow"] == list(found.slow_sentences()) == [sentence]
    assert [pair["slow"] for pair in found.as_json()["pairs"]].count(["latency"]) == 1
    # below 1 ms, what waits for a CPU is not told from the network
    assert result_of({**dict.fromkeys(pairs_of(4), fast), (1, 3): late}, "gloo").slow == ()
    assert result_of({(0, 1): slow}).slow == (), "with two machines there is nothing to compare"
    machine = NetworkMachine(0, "node0", (0, 1, 2), "lo")
    within = [PairResult(*pair, *(slow if pair == (0, 2) else fast), 1 << 20) for pair in pairs_of(3)]
    named = [list(NetworkResult(kind, 30, [machine], [], within, [], 3).slow_sentences()) for kind in ("nccl", "gloo")]
    assert named == [["rank 0 (node0) with rank 2 (node0): 4.0 GB/s, usual are 10.0 GB/s"], []]


def test_ranks_of_one_machine_measure_each_other_and_predict_the_share_of_a_step(starter, tmp_path):
    model = ("--model_family=sdxl", "--model_flavour=tiny", f"--output_dir={tmp_path}/run", "--gpu=H100")
    run = starter.start(ranks.command_line, 3, ["net", "check", "--use_cpu", "--seconds=2", "--json", *model])
    codes = run.wait()
    told = json_in(run.logs[0].read_text())
    assert (codes, told["exit_code"], told["slow"]) == ([0, 0, 0], 0, []), run.said
    assert (told["backend"], told["pairs_not_measured"]) == ("gloo", 0) and 1 < told["seconds"] < 10
    assert [machine["ranks"] for machine in told["machines"]] == [[0, 1, 2]]
    assert "chosen by gloo; GLOO_SOCKET_IFNAME=lo leads to rank 0" in told["machines"][0]["interface"]
    assert {(pair["first"], pair["second"]) for pair in told["pairs"]} == {(0, 1), (0, 2), (1, 2)}
    for pair in told["pairs"]:
        assert pair["kind"] == "within a machine" and 0 < pair["latency_seconds"] < 1 and pair["bytes_per_second"] > 1e6
    sizes = [each["message_bytes"] for each in told["all_reduce"]]
    assert sizes == sorted(sizes) and sizes[0] == 1 << 16
    largest, planned = told["all_reduce"][-1], told["planned"]
    assert largest["bus_bytes_per_second"] == pytest.approx(largest["message_bytes"] / largest["seconds"] * 4 / 3)
    assert planned["communication_seconds"] == pytest.approx(
        planned["bytes_per_step"] / largest["bus_bytes_per_second"]
    )
    there_and_back = pytest.approx(2_114_148 * 4 * 2 * 2 / 3)
    assert planned["bytes_per_step"] == there_and_back, "DDP's gradients in float32"
    assert planned["share"] == pytest.approx(planned["communication_seconds"] / planned["step_seconds"])
    assert 0 <= planned["waited_seconds"] < planned["step_seconds"]
    assert not (tmp_path / "run").exists() and all(log.read_text() == "" for log in run.logs[1:])


def test_one_rank_has_nothing_to_measure(capsys):
    with pytest.raises(SystemExit) as exited:
        main(["net", "check"])
    assert exited.value.code == 2 and "one rank has no network to check" in capsys.readouterr().err


@pytest.fixture
def switched(tmp_path, fork_server):
    prefix = f"st{os.getpid()}w"
    try:
        machines = wire_to_switch(tmp_path, prefix, 3, fork_server)
        slow_down(machines[2], machines[0], "80mbit")
        yield machines
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or error
        pytest.skip(f"cannot make a slow network here, which takes root and iproute2: {reason}")
    finally:
        tear_down(prefix, 4)


def test_a_slow_pair_of_three_machines_is_named_on_all(switched, tmp_path):
    meeting = (f"--main_process_ip={switched[0].address}", f"--main_process_port={PORT}", "--num_machines=3")
    flags = (*meeting, "--num_processes=3", "--use_cpu", "--seconds=4", f"--output_dir={tmp_path}/run")
    log = tmp_path / "run" / "log.txt"  # of a run, which a check must not touch
    log.parent.mkdir()
    log.write_text("an earlier run\n")
    command = ("net", "check", *flags, "--json")
    started = [machine.launch(*command, f"--machine_rank={n}") for n, machine in enumerate(switched)]
    assert [each.wait() for each in started] == [3, 3, 3], "\n---\n".join(each.said for each in started)
    told = json_in(started[0].said)
    rates = {(pair["first"], pair["second"]): pair["bytes_per_second"] for pair in told["pairs"]}
    assert set(rates) == {(0, 1), (0, 2), (1, 2)} and told["exit_code"] == 3
    # 80 Mbit/s are 10 MB/s, of which TCP and IP take some
    assert 3e6 < rates[0, 2] < 12e6 and min(rates[0, 1], rates[1, 2]) > 3 * rates[0, 2]
    assert [machine["interface"] for machine in told["machines"]] == [machine.cable for machine in switched]
    # On a busy machine others may be slow as well, but not as slow.
    by_bandwidth = {(pair["first"], pair["second"]) for pair in told["pairs"] if "bandwidth" in pair["slow"]}
    assert (0, 2) in by_bandwidth
    names = [f"machine {n} ({machine.name})" for n, machine in enumerate(switched)]
    named = "|".join(re.escape(f"{names[n]} with {other}") for n, other in ((0, names[2]), (0, "all"), (2, "all")))
    sentence = rf"({named})( others)?: \d+\.\d MB/s, usual are [\d.]+ [MG]B/s"
    for command in started:
        assert re.search(sentence, command.said) and "Traceback" not in command.said
    assert f"error: machine 0 ({switched[0].name}): rank 0: slow: " in started[1].said
    assert list(log.parent.iterdir()) == [log] and log.read_text() == "an earlier run\n"
