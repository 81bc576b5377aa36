"""How linear layers multiply and store their weights, in training and inference: one class per form in
`penstock.config.formats.PRODUCTS`."""
