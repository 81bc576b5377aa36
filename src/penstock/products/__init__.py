"""How linear layers multiply and store their weights, in training and in inference: one class for each form in
`penstock.config.formats.PRODUCTS`.
"""
