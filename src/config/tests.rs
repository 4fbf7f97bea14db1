use super::*;

#[test]
fn probe() {
    let problems = load(Path::new("config/isthmus.yaml"), &|_| None);
    match problems {
        Ok(config) => println!("{config:#?}"),
        Err(list) => {
            for problem in list {
                println!("{problem}");
            }
            panic!();
        }
    }
}
