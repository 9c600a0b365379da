"""TLS: the server's certificate and key, which can be replaced while it runs."""

import ssl

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError

HANDSHAKE_S = 15.0  # time for a client to finish the handshake
GOODBYE_S = 2.0  # time for a client to confirm the end of a connection


class Tls:
    """The certificate and key of new connections. Open connections keep theirs.

    A listener cannot change its SSL context, so its context looks up the current one in each
    handshake.
    """

    def __init__(self, certfile: str, keyfile: str | None) -> None:
        """Raise ConfigError for files that cannot be read or do not belong together."""
        self._files = certfile, keyfile
        self.paths = [certfile, *([keyfile] if keyfile else [])]
        self._present = self.read()
        self.context = self._present
        self.context.sni_callback = self._choose

    def _choose(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Use the current context. Called in each handshake, also without a server name."""
        if connection.context is not self._present:
            connection.context = self._present

    def use(self, context: ssl.SSLContext) -> None:
        """Use a context from `read` for all later connections."""
        self._present = context

    def read(self) -> ssl.SSLContext:
        """Read the files; blocks. Raise ConfigError."""
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
                    "" if keyfile else ", which may be in a separate file, --ssl-keyfile"
                )
            else:
                why = str(error)
            raise ConfigError(f"--ssl-certfile {where}: {why}") from error
        return context


def tls_of(config: ServerConfig) -> Tls | None:
    """Return the TLS settings; None without a certificate. Raise ConfigError."""
    if config.ssl_certfile is None:
        if config.ssl_keyfile is not None:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile")
        return None
    return Tls(config.ssl_certfile, config.ssl_keyfile)


def _refuse() -> str:
    """Refuse an encrypted key. Without this callback OpenSSL would ask on the terminal."""
    raise ValueError(
        "the key is encrypted; write it without a passphrase, readable by the server's user only"
    )
