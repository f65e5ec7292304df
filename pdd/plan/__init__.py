"""How many of which chip, and how wide a link: catalogue, roofline costs, capacity and cost (`pdd plan`)."""
