"""The description of the machine in a result."""

from pathlib import Path

from benchmarks import machine


def test_a_result_says_where_it_was_made() -> None:
    about = machine.describe()
    assert set(about) == {"commit", "machine", "command", "start"}
    assert about["machine"]["n_cpus"] >= 1


def test_the_processor_is_named_as_it_names_itself(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: AMD EPYC 9R14\n")
    assert machine.cpu_name(cpuinfo) == "AMD EPYC 9R14"
    assert machine.cpu_name(tmp_path / "none")
