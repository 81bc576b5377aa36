"""Operations with more than one implementation: a plain reference, faster forms, and the choice between them."""
