"""Makes one plan happen on one device: tables, inputs, forward, sampling."""
