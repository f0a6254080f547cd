import java.io.InputStream;
import java.io.PrintStream;
import java.lang.reflect.InvocationTargetException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import org.apache.kafka.common.utils.Exit;

/**
 * Runs Kafka's command line tools one after another in one JVM: to start one costs more than most of what they do.
 *
 * Each argument is a tool, its parts on lines of their own: the file of its input, the file of its output, its main
 * class, its arguments. The first that fails is the last, and its status is ours.
 */
class Tools {
    static class Ended extends RuntimeException {
        final int status;

        Ended(int status, String message) {
            super(message);
            this.status = status;
        }
    }

    static final List<Runnable> hooks = new ArrayList<>();

    public static void main(String[] tools) throws Exception {
        Exit.setExitProcedure((status, message) -> { throw new Ended(status, message); });
        Exit.setHaltProcedure((status, message) -> { throw new Ended(status, message); });
        Exit.setShutdownHookAdder((name, hook) -> hooks.add(hook));
        for (String tool : tools) {
            String[] parts = tool.split("\n");
            int status = run(Path.of(parts[0]), Path.of(parts[1]), parts[2], Arrays.copyOfRange(parts, 3, parts.length));
            if (status != 0) {
                System.err.println(String.join(" ", parts) + " exited " + status);
                Runtime.getRuntime().halt(status);
            }
        }
        Runtime.getRuntime().halt(0); // threads of the tools may go on
    }

    static int run(Path input, Path output, String main, String[] arguments) throws Exception {
        PrintStream terminal = System.out;
        try (InputStream in = Files.newInputStream(input); PrintStream out = new PrintStream(output.toFile())) {
            System.setIn(in);
            System.setOut(out);
            Class.forName(main).getMethod("main", String[].class).invoke(null, (Object) arguments);
        } catch (InvocationTargetException thrown) {
            if (!(thrown.getCause() instanceof Ended)) {
                throw thrown;
            }
            int status = ((Ended) thrown.getCause()).status;
            if (status != 0) {
                return status;
            }
        } finally {
            System.setOut(terminal);
            for (Runnable hook : hooks) {
                hook.run();
            }
            hooks.clear();
        }
        return 0;
    }
}
