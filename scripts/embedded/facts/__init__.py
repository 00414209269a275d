"""What the embedded model knows: tables of questions and answers, and no code beyond what reads them."""
