"""Record which of moeserve's source files a process runs. Python imports this module at startup.

SIGUSR1 starts over. SIGUSR2 writes the files, in the order of their first call, to
$MOESERVE_TRACE/<pid>.
"""

import os
import signal
import sys
import threading
from types import CodeType, FrameType

_FOLDER = f"{os.sep}moeserve{os.sep}"
_seen: dict[CodeType, None] = {}


def _note(frame: FrameType, event: str, arg: object) -> None:
    if event == "call":
        _seen[frame.f_code] = None


def _begin(number: int, frame: FrameType | None) -> None:
    _seen.clear()


def _write(number: int, frame: FrameType | None) -> None:
    files = dict.fromkeys(code.co_filename for code in list(_seen) if _FOLDER in code.co_filename)
    path = os.path.join(os.environ["MOESERVE_TRACE"], str(os.getpid()))
    with open(path + ".part", "w", encoding="utf-8") as out:
        out.write("\n".join(files))
    os.rename(path + ".part", path)


if "MOESERVE_TRACE" in os.environ:
    signal.signal(signal.SIGUSR1, _begin)
    signal.signal(signal.SIGUSR2, _write)
    threading.setprofile(_note)
    sys.setprofile(_note)
