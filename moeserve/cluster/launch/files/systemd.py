"""One systemd unit for all machines: its instance is the machine's number."""

import re

from moeserve.cluster.launch.files.deployment import Deployment
from moeserve.errors import ConfigError


def systemd(it: Deployment) -> str:
    """Returns the template unit. Raises ConfigError without --rendezvous."""
    if it.rendezvous is None and it.nodes > 1:
        raise ConfigError("--print systemd: say where machine 0 is, as in `-- serve MODEL --rendezvous 10.0.0.1:29500`")
    several = (
        f" --nnodes {it.nodes} --node-rank %i --cluster-key-file /etc/moeserve/cluster.key" if it.nodes > 1 else ""
    )
    return f"""# /etc/systemd/system/moeserve@.service on each of {it.nodes} machines; then on machine 0, 1, ...:
#   systemctl enable --now moeserve@0      (its own number on each)
# All of them need one secret, made once and copied:
#   head -c 32 /dev/urandom | base64 > /etc/moeserve/cluster.key
#   chown moeserve /etc/moeserve/cluster.key; chmod 600 /etc/moeserve/cluster.key
[Unit]
Description=moeserve, machine %i of {it.nodes}
After=network-online.target
Wants=network-online.target
StartLimitIntervalSec=0

[Service]
Type=exec
User=moeserve
Group=moeserve
ExecStart=/opt/moeserve/bin/moeserve serve {" ".join(map(_quoted, it.words_for_all))}{several}
ExecReload=/bin/kill -HUP $MAINPID
# Machine 0 drains for {it.drain_s} s on SIGTERM; a machine that ends is there again at once, and requests go on.
KillMode=mixed
TimeoutStopSec={it.stop_s}
Restart=always
RestartSec=1
# Exit codes 3 to 5: checkpoint, port or memory. A new try would end alike. 2 may mean that machine 0 is not there yet.
RestartPreventExitStatus=3 4 5
LimitNOFILE=65536
LimitMEMLOCK=infinity
StateDirectory=moeserve
CacheDirectory=moeserve
Environment=HOME=/var/lib/moeserve XDG_CACHE_HOME=/var/cache/moeserve
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes

[Install]
WantedBy=multi-user.target
"""


def _quoted(word: str) -> str:
    """Returns a word as systemd's command lines have it."""
    word = word.replace("\\", "\\\\").replace("%", "%%").replace("$", "$$")
    if re.fullmatch(r"[\w@%+=:,./$-]+", word):
        return word
    return '"' + word.replace('"', '\\"').replace("\n", "\\n") + '"'
