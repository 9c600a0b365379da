"""TLS: the server's certificate and key, which may be replaced while it runs."""

import ssl

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError

HANDSHAKE_S = 15.0  # for a client to finish the handshake
GOODBYE_S = 2.0  # for a client to answer the end of a connection


class Tls:
    """The context of all connections. Those that are open keep the certificate with which they
    began.

    The constructor and `reload` raise ConfigError for files that cannot be read or do not belong
    together.
    """

    def __init__(self, certfile: str, keyfile: str | None) -> None:
        self._files = certfile, keyfile
        self.paths = [certfile, *([keyfile] if keyfile else [])]
        self.context = self._fresh()

    def reload(self) -> None:
        """Gives later connections the files' present content."""
        self._fresh()  # first, so that bad files leave the context as it is
        self.context.load_cert_chain(*self._files, password=_refuse)

    def _fresh(self) -> ssl.SSLContext:
        certfile, keyfile = self._files
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        for path in self.paths:
            flag = "--ssl-certfile" if path == certfile else "--ssl-keyfile"
            with ConfigError.instead_of(OSError, f"{flag} {path}"), open(path, "rb"):
                pass
        try:
            context.load_cert_chain(certfile, keyfile, password=_refuse)
        except (ssl.SSLError, ValueError) as error:
            where = certfile if keyfile is None else f"{certfile} with --ssl-keyfile {keyfile}"
            if "KEY_VALUES_MISMATCH" in str(error):
                why = "the key is not that of the certificate"
            elif isinstance(error, ssl.SSLError):
                why = "expected a PEM certificate chain and its unencrypted PEM key" + (
                    "" if keyfile else ", which may be in a file of its own, --ssl-keyfile"
                )
            else:
                why = str(error)
            raise ConfigError(f"--ssl-certfile {where}: {why}") from error
        return context


def tls_of(config: ServerConfig) -> Tls | None:
    """Returns the TLS settings, None without a certificate. Raises ConfigError."""
    if config.ssl_certfile is None:
        if config.ssl_keyfile is not None:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile")
        return None
    return Tls(config.ssl_certfile, config.ssl_keyfile)


def _refuse() -> str:
    """Called for an encrypted key; without it OpenSSL would ask on the terminal."""
    raise ValueError(
        "the key is encrypted; write it without a passphrase, readable by the server's user only"
    )
