"""What JAX's profiler wrote down, for the studies that ask where a step's time goes."""

import gzip
import json
from pathlib import Path
from typing import Any


def device_events(folder: Path) -> list[dict[str, Any]]:
    """What ran on the device's streams: name, dur (microseconds) and args of each kernel."""
    found = []
    for path in folder.rglob("*.trace.json.gz"):
        with gzip.open(path) as file:
            events = json.loads(file.read())["traceEvents"]
        devices = {
            e["pid"] for e in events
            if e.get("name") == "process_name" and "/device:" in e["args"]["name"]
        }  # fmt: skip
        streams = {
            (e["pid"], e["tid"]) for e in events
            if e.get("name") == "thread_name" and e["pid"] in devices and "Stream" in e["args"]["name"]
        }  # fmt: skip
        found += [e for e in events if e.get("ph") == "X" and (e["pid"], e.get("tid")) in streams]
    return found
