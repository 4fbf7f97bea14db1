//! The code blocks of a Markdown page.

/// A fenced code block.
#[derive(Clone, Debug)]
pub struct Block {
    /// The info string after the opening fence, such as `yaml file=NAME`.
    pub info: String,
    pub text: String,
    /// The heading above the block.
    pub heading: String,
    /// The line number of the opening fence, from 1.
    pub line: usize,
}

impl Block {
    pub fn language(&self) -> &str {
        self.info.split(' ').next().unwrap_or_default()
    }

    /// Returns the words of the info string after the language.
    pub fn marks(&self) -> impl Iterator<Item = &str> {
        self.info.split(' ').skip(1)
    }

    /// Returns true if a test runs these commands: all but those with the mark `by-hand`, which change or build the host.
    pub fn is_run(&self) -> bool {
        self.language() == "sh" && self.marks().all(|mark| mark != "by-hand")
    }

    /// Returns true if commands need a Kubernetes cluster. `tests/chart` runs these, `tests/e2e` the others.
    pub fn needs_cluster(&self) -> bool {
        let begins =
            |line: &str| ["kubectl ", "helm "].iter().any(|tool| line.trim_start().starts_with(tool));
        self.text.lines().any(begins)
    }

    /// Returns true if only an empty line is between this block and the next one.
    pub fn is_followed_by(&self, next: &Self) -> bool {
        self.line + self.text.lines().count() + 3 == next.line
    }

    /// Returns the name of the file that the block shows (`yaml file=NAME`).
    pub fn file(&self) -> Option<&str> {
        self.marks().find_map(|mark| mark.strip_prefix("file="))
    }
}

/// Splits a page into its code blocks and the text around them.
pub fn split(page: &str) -> (Vec<Block>, String) {
    let (mut blocks, mut prose, mut open) = (Vec::new(), String::new(), None::<Block>);
    let mut heading = "";
    for (index, line) in page.lines().enumerate() {
        match (line.trim_start().strip_prefix("```"), open.take()) {
            (Some(info), None) => {
                open = Some(Block {
                    info: info.to_owned(),
                    text: String::new(),
                    heading: heading.to_owned(),
                    line: index + 1,
                });
            }
            (Some(_), Some(block)) => blocks.push(block),
            (None, Some(mut block)) => {
                block.text.push_str(line);
                block.text.push('\n');
                open = Some(block);
            }
            (None, None) => {
                if line.starts_with('#') {
                    heading = line.trim_start_matches(['#', ' ']);
                }
                prose.push_str(line);
                prose.push('\n');
            }
        }
    }
    assert!(open.is_none(), "a code block does not end");
    (blocks, prose)
}
