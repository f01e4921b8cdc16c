from __future__ import annotations

from simpletuner.system.processes import host_memory


def test_what_is_available_is_what_the_narrowest_container_leaves(tmp_path, monkeypatch):
    assert host_memory.available_bytes() > 0
    proc, outer = tmp_path / "proc", tmp_path / "cgroup" / "job"
    inner = outer / "step"
    (proc / "self").mkdir(parents=True)
    inner.mkdir(parents=True)
    monkeypatch.setattr(host_memory, "PROC", proc)
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path / "cgroup")
    assert host_memory.available_bytes() == 0, "unknown"
    (proc / "meminfo").write_text("MemTotal:  4000 kB\nMemFree:  10 kB\nMemAvailable:  3000 kB\nHugePages_Total: 0\n")
    (proc / "self" / "cgroup").write_text("0::/job/step\n")
    assert host_memory.available_bytes() == 3000 * 1024
    for folder, limit, used, cached in ((outer, "1000000", "400000", "100000"), (inner, "max", "300000", "0")):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\nfile {cached}\n")
    assert host_memory.available_bytes() == 700_000
