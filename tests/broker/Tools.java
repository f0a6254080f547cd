import java.io.BufferedReader;
import java.io.InputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import org.apache.kafka.common.utils.Exit;
import org.slf4j.LoggerFactory;

/**
 * Runs Kafka's command line tools one after another in one JVM: to start one costs more than most of what they do.
 *
 * Standard input names a tool after the other, until its end: a line with the number of its parts, and a line for each
 * part: the file of its input, the file of its output, its main class, its arguments. Standard output has a line for
 * each that has ended, its exit status. What tools say on standard error, and log, goes to ours.
 */
class Tools {
    /** Ends a tool in place of its JVM. Some tools catch it and exit again: the first status is what they meant. */
    static class Ended extends Error {
        Ended(int ended) {
            status = status == null ? ended : status;
        }
    }

    static final List<Runnable> hooks = new ArrayList<>();
    static Integer status;

    public static void main(String[] none) throws Exception {
        Exit.setExitProcedure((ended, message) -> { throw new Ended(ended); });
        Exit.setHaltProcedure((ended, message) -> { throw new Ended(ended); });
        Exit.setShutdownHookAdder((name, hook) -> hooks.add(hook));
        PrintStream statuses = System.out;
        System.setOut(System.err);
        LoggerFactory.getLogger(Tools.class); // which keeps the standard output that it finds when it begins
        BufferedReader asked = new BufferedReader(new InputStreamReader(System.in));
        for (String count; (count = asked.readLine()) != null; ) {
            String[] parts = new String[Integer.parseInt(count)];
            for (int part = 0; part < parts.length; part++) {
                parts[part] = asked.readLine();
            }
            status = null;
            run(parts);
            statuses.println(status == null ? 0 : status);
        }
        Runtime.getRuntime().halt(0); // threads of the tools may go on
    }

    static void run(String[] parts) throws Exception {
        try (InputStream in = Files.newInputStream(Path.of(parts[0])); PrintStream out = new PrintStream(parts[1])) {
            System.setIn(in);
            System.setOut(out);
            String[] arguments = Arrays.copyOfRange(parts, 3, parts.length);
            Class.forName(parts[2]).getMethod("main", String[].class).invoke(null, (Object) arguments);
        } catch (ReflectiveOperationException thrown) {
            if (status == null) {
                thrown.printStackTrace();
                status = 1; // as a JVM whose main ends so
            }
        } finally {
            System.setOut(System.err);
            for (Runnable hook : hooks) {
                hook.run();
            }
            hooks.clear();
        }
    }
}
