"""Share groups (KIP-932) as a second engine of the Message family: `queue=share`."""
