"""Compiles C++ for the processor it runs on, once, and loads it. Imports no framework.

The sources of a folder are one shared library with a C interface. It is built by the system's compiler in seconds and kept in a cache
directory under a name that says what it was built from: sources, flags, compiler, and what that compiler makes of ``-march=native``.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

_COMPILERS: Final = ("g++", "c++", "clang++")
# Of the processor's time, for each of the compiler's processes: a minute is plenty, however long a busy machine takes to give it. One that
# waits for something else, as for a disk that is gone, has the other limit.
_PROCESSOR_LIMIT_S: Final = 600
_TIMEOUT_S: Final = 3600
_FLAGS: Final = ("-std=c++20", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
# A compiler and its own children are one process group, which a watcher in it kills once nobody holds the other end of its standard input:
# a pipe that only we hold, so that is when we have ended, by whatever signal, or have given up waiting.
_BESIDE: Final = """
ulimit -t "$1" || exit
shift
exec 3<&0 </dev/null
(read -r _ <&3; kill -KILL 0) >/dev/null 2>&1 &
"$@" 3<&-
status=$?
kill $!
exit $status
"""
# Compilers take 256 bits by default even where 512 are as fast per instruction.
_X86_FLAGS: Final = ("-mprefer-vector-width=512",)


class NativeUnavailableError(RuntimeError):
    """``reason``: a name for the fallback. The message says more."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


NO_COMPILER: Final = "native_kernels_no_compiler"
NOT_COMPILED: Final = "native_kernels_not_compiled"


def compiled(name: str, sources: Path, flags: tuple[str, ...], cache_dir: str | None, headers: Path | None = None) -> ctypes.CDLL:
    """The library of the folder ``sources``, whose files may include those of ``headers``, from ``cache_dir`` or built into it as ``name``;
    None: built for this process alone. Raises NativeUnavailableError.
    """
    found = next((path for path in map(shutil.which, _COMPILERS) if path is not None), None)
    if found is None:
        raise NativeUnavailableError(NO_COMPILER, f"no C++ compiler on the path, tried {', '.join(_COMPILERS)}")
    headers = sources if headers is None else headers
    flags = (*_FLAGS, *(_X86_FLAGS if platform.machine() in ("x86_64", "AMD64") else ()), *flags)
    if cache_dir is None:
        with tempfile.TemporaryDirectory(prefix="pdd-native-") as directory:
            return _load(_build(found, flags, sources, headers, Path(directory) / f"{name}.so"))
    library = Path(cache_dir) / f"{name}-{_key(found, flags, sources, headers)}.so"
    if not library.exists():
        _build_once(found, flags, sources, headers, library)
    return _load(library)


def _key(compiler: str, flags: tuple[str, ...], sources: Path, headers: Path) -> str:
    """What the library depends on. The macros that a compiler predefines name its version and all that ``-march=native`` stands for."""
    macros = _run([compiler, *flags, "-dM", "-E", "-x", "c++", os.devnull]).stdout
    digest = hashlib.sha256()
    files = sorted({*sources.glob("*.cpp"), *sources.glob("*.h"), *headers.glob("*.h")})
    for part in (" ".join(flags).encode(), macros.encode(), *(path.read_bytes() for path in files)):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:24]


def _build_once(compiler: str, flags: tuple[str, ...], sources: Path, headers: Path, library: Path) -> None:
    """Workers that start together wait for the first of them instead of compiling the same beside it."""
    library.parent.mkdir(parents=True, exist_ok=True)
    directory = os.open(library.parent, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)  # let go of on closing, or when the process ends
        if not library.exists():
            _build(compiler, flags, sources, headers, library)
    finally:
        os.close(directory)


def _build(compiler: str, flags: tuple[str, ...], sources: Path, headers: Path, library: Path) -> Path:
    """Whole or not at all: where locks do not hold, the last one's rename wins over an equal file. As many files at once as there are
    cores.
    """
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="native-") as directory:
        made = Path(directory) / "made.so"

        def translate(source: Path) -> str:
            translated = str(made.with_name(f"{source.stem}.o"))
            _run([compiler, *flags, f"-I{headers}", "-c", str(source), "-o", translated])
            return translated

        with ThreadPoolExecutor(os.cpu_count(), "native-build") as workers:
            objects = list(workers.map(translate, sorted(sources.glob("*.cpp"))))
        _run([compiler, *flags, *objects, "-o", str(made)])
        made.replace(library)
    return library


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Raises NativeUnavailableError. However this process ends, the compiler ends with it: see ``_BESIDE``."""
    limited = ["sh", "-c", _BESIDE, "sh", str(_PROCESSOR_LIMIT_S), *command]
    ours, lifeline = os.pipe()
    try:
        return subprocess.run(limited, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S, stdin=ours, process_group=0)
    except (OSError, subprocess.SubprocessError) as error:
        details = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
        raise NativeUnavailableError(NOT_COMPILED, f"{command[0]} could not build native kernels: {details}") from error
    finally:
        os.close(lifeline)
        os.close(ours)


def _load(library: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise NativeUnavailableError(NOT_COMPILED, f"native kernels cannot be loaded: {error}") from error
