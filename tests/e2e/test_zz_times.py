import time, json, os, signal
import pytest
from pathlib import Path
import importlib.util
spec = importlib.util.spec_from_file_location("tm", Path(__file__).with_name("test_mesh.py"))
tm = importlib.util.module_from_spec(spec); spec.loader.exec_module(tm)
mesh = tm.mesh; coordinate = tm.coordinate; expected = tm.expected

@pytest.mark.parametrize(("place","part","harm"), [(3,"peer",tm.kill),(1,"worker",tm.kill),(0,"worker",tm.stop),(2,"peer",tm.stop)])
def test_times(mesh, coordinate, place, part, harm):
    t0=time.monotonic()
    def say(x): print(f"{time.monotonic()-t0:.2f} {x}", flush=True)
    peer = mesh.peers[place]
    c = coordinate()
    url = mesh.url(c); say("ready")
    with tm.streaming(url) as response:
        say("streaming")
        harm(peer.process.pid if part == "peer" else peer.workers()[0])
        say("harmed")
        data = [line[6:].strip() for line in response if line.startswith(b"data: ")]
    say("error " + str(json.loads(data[-1])))
    c.exit_code(); say("exit " + c.lines[-1])
    for other in mesh.peers:
        if other is not peer: other.wait_for("released")
    say("released")
    if part == "peer":
        peer.restart(); peer.wait_for("listening on")
    say("restarted")
    a = coordinate(); mesh.url(a); say("again ready")
    a.process.terminate(); a.exit_code(); say("over")
    for p in mesh.peers: print(p.lines[-14:])
