//! The syntax that nginx and sniproxy share: directives of words, with blocks in braces, and comments after `#`. A directive of nginx
//! ends with `;` or a block, one of sniproxy with the line or a block.

/// A directive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Directive {
    /// The number of its first line, from 1.
    pub(super) line: usize,
    /// The words, without quotes; there is at least one.
    pub(super) words: Vec<String>,
    /// The directives in its braces; `None` if it has none.
    pub(super) block: Option<Vec<Self>>,
}

impl Directive {
    /// Returns the first word.
    pub(super) fn name(&self) -> &str {
        self.words.first().map_or("", String::as_str)
    }

    /// Returns the words after the first one.
    pub(super) fn values(&self) -> Vec<&str> {
        self.words.iter().skip(1).map(String::as_str).collect()
    }

    /// Returns the directives in the braces.
    pub(super) fn inner(&self) -> &[Self] {
        self.block.as_deref().unwrap_or_default()
    }

    /// Sets the line of the directive and of all in it: that of the line which includes its file.
    pub(super) fn move_to(&mut self, line: usize) {
        self.line = line;
        self.block.iter_mut().flatten().for_each(|inner| inner.move_to(line));
    }

    /// Returns the words as they appear in a remark.
    pub(super) fn quoted(&self) -> String {
        format!("`{}`", self.words.join(" "))
    }
}

/// The end of a directive without a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Semicolon,
    Line,
}

/// The deepest nesting of blocks that is read.
const DEPTH_MAX: usize = 16;

/// A sign of the syntax, or a word, with its line.
enum Token {
    Word(String),
    Open,
    Close,
    End,
}

/// Parses a text. Faults are returned with their lines; what follows a fault is still read.
pub(super) fn parse(text: &str, end: End) -> (Vec<Directive>, Vec<(usize, String)>) {
    let mut faults = Vec::new();
    let tokens = tokens(text, end, &mut faults);
    let mut open: Vec<(Directive, Vec<Directive>)> = Vec::new();
    let (mut top, mut words): (Vec<Directive>, Vec<String>) = (Vec::new(), Vec::new());
    let (mut first, mut last) = (1, 1);
    for (line, token) in tokens {
        last = line;
        match token {
            Token::Word(word) => {
                if words.is_empty() {
                    first = line;
                }
                words.push(word);
            }
            Token::End if words.is_empty() => {}
            Token::End => {
                let words = std::mem::take(&mut words);
                let directive = Directive { line: first, words, block: None };
                open.last_mut().map_or(&mut top, |(_, inner)| inner).push(directive);
            }
            Token::Open if words.is_empty() => {
                faults.push((line, "a `{` has no directive before it".to_owned()))
            }
            Token::Open if open.len() == DEPTH_MAX => {
                faults.push((
                    line,
                    format!("blocks are more than {DEPTH_MAX} deep; the rest of the file is not read"),
                ));
                break;
            }
            Token::Open => {
                let words = std::mem::take(&mut words);
                open.push((Directive { line: first, words, block: None }, Vec::new()));
            }
            Token::Close => {
                if !words.is_empty() {
                    let words = std::mem::take(&mut words);
                    if end == End::Semicolon {
                        faults.push((first, format!("`{}` has no `;` at its end", words.join(" "))));
                    }
                    let directive = Directive { line: first, words, block: None };
                    open.last_mut().map_or(&mut top, |(_, inner)| inner).push(directive);
                }
                match open.pop() {
                    Some((head, inner)) => {
                        let directive = Directive { block: Some(inner), ..head };
                        open.last_mut().map_or(&mut top, |(_, inner)| inner).push(directive);
                    }
                    None => faults.push((line, "a `}` closes no block".to_owned())),
                }
            }
        }
    }
    if !words.is_empty() {
        faults.push((first, format!("`{}` has no end", words.join(" "))));
    }
    while let Some((head, inner)) = open.pop() {
        faults.push((
            head.line,
            format!("the block of {} is not closed (the file ends in line {last})", head.quoted()),
        ));
        let directive = Directive { block: Some(inner), ..head };
        open.last_mut().map_or(&mut top, |(_, inner)| inner).push(directive);
    }
    (top, faults)
}

fn tokens(text: &str, end: End, faults: &mut Vec<(usize, String)>) -> Vec<(usize, Token)> {
    let mut tokens = Vec::new();
    let (mut word, mut begun, mut quote, mut line) = (None::<String>, 1, None, 1);
    let mut signs = text.chars().peekable();
    while let Some(sign) = signs.next() {
        match (quote, sign) {
            (Some(open), sign) if sign == open => quote = None,
            (Some(_), '\\') if signs.peek().is_some_and(|next| ['\\', '"', '\''].contains(next)) => {
                word.get_or_insert_default().extend(signs.next());
            }
            (Some(_), sign) => word.get_or_insert_default().push(sign),
            // Outside quotes, nginx keeps a backslash, for example that of a regular expression.
            (None, '\\') => {
                let word = word.get_or_insert_default();
                word.push('\\');
                word.extend(signs.next());
            }
            (None, '"' | '\'') if word.is_none() => {
                (quote, begun) = (Some(sign), line);
                word.get_or_insert_default();
            }
            (None, '#') if word.is_none() => while signs.next_if(|next| *next != '\n').is_some() {},
            (None, '{')
                if word.as_deref() == Some("$") || word.as_ref().is_some_and(|word| word.ends_with('$')) =>
            {
                // A variable in braces: `${name}`, of which the name needs no braces unless a sign of names follows.
                let word = word.get_or_insert_default();
                let start = word.len();
                while let Some(next) = signs.next_if(|next| *next != '}' && *next != '\n') {
                    word.push(next);
                }
                signs.next_if_eq(&'}');
                if signs.peek().is_some_and(|next| next.is_ascii_alphanumeric() || *next == '_') {
                    word.insert(start, '{');
                    word.push('}');
                }
            }
            (None, '{' | '}' | ';') => {
                tokens.extend(word.take().map(|word| (begun, Token::Word(word))));
                tokens.push((
                    line,
                    match sign {
                        '{' => Token::Open,
                        '}' => Token::Close,
                        _ => Token::End,
                    },
                ));
            }
            (None, sign) if sign.is_whitespace() => {
                tokens.extend(word.take().map(|word| (begun, Token::Word(word))));
                if sign == '\n' && end == End::Line {
                    tokens.push((line, Token::End));
                }
            }
            (None, sign) => {
                if word.is_none() {
                    begun = line;
                }
                word.get_or_insert_default().push(sign);
            }
        }
        if sign == '\n' {
            line += 1;
        }
    }
    if quote.is_some() {
        faults.push((begun, "a quote is not closed".to_owned()));
    }
    tokens.extend(word.take().map(|word| (begun, Token::Word(word))));
    if end == End::Line {
        tokens.push((line, Token::End));
    }
    tokens
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(all: &[Directive]) -> String {
        let one = |directive: &Directive| {
            let block = directive.block.as_deref().map(|inner| format!("{{{}}}", shown(inner)));
            format!("{}:{}{}", directive.line, directive.words.join("|"), block.unwrap_or_default())
        };
        all.iter().map(one).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn directives_have_words_quotes_and_blocks() {
        let text = "# c\nstream {\n  map $a $b { hostnames; ~^a\\.b$ 'x y'; \"q;\" z; }\n  server { listen 1; }\n}\n";
        let (all, faults) = parse(text, End::Semicolon);
        assert_eq!(
            shown(&all),
            "2:stream{3:map|$a|$b{3:hostnames 3:~^a\\.b$|x y 3:q;|z} 4:server{4:listen|1}}"
        );
        assert_eq!(faults, []);
        let (all, faults) = parse("a 1\nb { c d\n e *\n}\n# f\ng", End::Line);
        assert_eq!(shown(&all), "1:a|1 2:b{2:c|d 3:e|*} 6:g");
        assert_eq!(faults, []);
    }

    #[test]
    fn faults_are_named_and_the_rest_is_read() {
        for (text, wanted) in [
            ("a { b; ", "is not closed"),
            ("a; }", "closes no block"),
            ("{ a; }", "no directive before it"),
            ("a 'b;", "a quote is not closed"),
            ("a { b }", "no `;` at its end"),
            ("a", "has no end"),
        ] {
            let (_, faults) = parse(text, End::Semicolon);
            assert!(faults.iter().any(|(_, fault)| fault.contains(wanted)), "{text}: {faults:?}");
        }
        let deep = "a {".repeat(100);
        assert!(parse(&deep, End::Semicolon).1.iter().any(|(_, fault)| fault.contains("deep")));
    }
}
