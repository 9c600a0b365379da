"""The model runner executes step plans on a device: tables, inputs, forward pass and sampling."""
