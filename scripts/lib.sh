# Sourced by the other scripts. `ready` makes .venv (or what `venv` was set to, with the version `torch` of PyTorch) with the exact packages of
# requirements.lock and shardwise itself, once; afterwards it returns at once. POSIX shell, python3 >= 3.11 with venv, and pip's network (or mirror)
# the first time.

root=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)
venv="$root/.venv"
torch=

say() { printf 'shardwise: %s\n' "$*"; }

fail() {
    printf 'shardwise: %s\n' "$*" >&2
    exit 2
}

find_python() {
    for name in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return 0
        fi
    done
    return 1
}

# What the environment was made from: the pinned packages, shardwise's own description, and where it lies.
wanted() {
    { cat "$root/requirements.lock" "$root/pyproject.toml"; printf '%s' "$torch"; } | cksum
    printf '%s\n' "$root"
}

is_ready() { [ -x "$venv/bin/shardwise" ] && [ "$(cat "$venv/.ready" 2>/dev/null)" = "$(wanted)" ]; }

install() {
    log="$venv/install.log"
    # What takes long is shown as it happens. A pipe hides pip's exit status, so it is written down.
    { "$venv/bin/python" -m pip install --disable-pip-version-check "$@" 2>&1 || echo "pip failed"; } |
        tee "$log" | sed -n -u 's/^ *\(Downloading [^ ]* .*\)/  \1/p'
    if [ "$(tail -n 1 "$log")" = "pip failed" ]; then
        tail -n 15 "$log" >&2
        fail "pip could not install the packages (its last words are above, all of them in ${venv##*/}/install.log). It needs the network" \
            "once: check it, or name a mirror with PIP_INDEX_URL, then run the same command again."
    fi
}

make_environment() {
    if ! [ -x "$venv/bin/python" ] || ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
        python=$(find_python) || fail "needs Python 3.11 or newer; found $(python3 --version 2>/dev/null || echo none)." \
            "Install it, or name one: PYTHON=/path/to/python3 $0"
        say "making the virtual environment ${venv##*/} with $("$python" --version)"
        "$python" -m venv "$venv" >&2 || {
            rm -rf "$venv"
            fail "$python -m venv failed (above). On Debian and Ubuntu: apt install python3-venv; then run the same command again."
        }
    fi
    say "installing $(grep -c '^[a-zA-Z]' "$root/requirements.lock") pinned packages from requirements.lock into ${venv##*/} (once; PyTorch is the large one)"
    pins="$root/requirements.lock"
    if [ -n "$torch" ]; then # each PyTorch bounds setuptools in its own way
        pins="$venv/requirements.txt"
        sed -e "s/^torch[<>=].*/torch==$torch/" -e 's/^setuptools==.*/setuptools>=77/' "$root/requirements.lock" >"$pins"
    fi
    install --requirement "$pins"
    say "installing shardwise itself, editable"
    install --no-deps --no-build-isolation --editable "$root"
    wanted >"$venv/.ready"
}

ready() {
    is_ready && return 0
    # Two scripts at once must not install into each other.
    if command -v flock >/dev/null; then
        exec 9<"$root/requirements.lock"
        flock -n 9 || { say "waiting for another script that is installing"; flock 9; }
    fi
    is_ready || make_environment
    if command -v flock >/dev/null; then exec 9<&-; fi
}
